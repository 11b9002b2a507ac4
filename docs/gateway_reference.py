"""Generator of `docs/gateway-api.md` from the gateway's OpenAPI schema; `make docs` runs it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.serving.gateway.app import build_app
from ostinato.infra.serving.gateway.config import GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.uploads.store import Uploads, UploadStore
from ostinato.models.rendering import load_renderer

Schema = dict[str, Any]
Row = tuple[str, Schema, bool, Schema]  # name, type, whether it is required, its description
HEAD = """# Gateway API

Generated from the schema that the gateway publishes (`GET /openapi.json`) by `make docs`; edit the routes, not this file.
Guide: [serving.md](serving.md), which also says how fields outside these tables are treated.

Every route except `GET /healthz` takes the key as `Authorization: Bearer KEY` or as `x-api-key: KEY`. A refusal is a 4xx and
a fault of the server a 5xx. Both have an [ErrorAnswer](#erroranswer) as body, and below `/v1/messages` an
[AnthropicErrorAnswer](#anthropicerroranswer).
"""
TOKENIZER = Path(__file__).parents[1] / "models" / "pretrained" / "nano_base"
BOUNDS = {
    "minimum": "at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "at most {:g}",
} | {
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
    "maxLength": "at most {} characters",
}


def gateway_schema() -> Schema:
    """The OpenAPI schema of a gateway with default settings."""
    tenant = TenantConfig(name="reference", api_keys=(SecretStr("key"),))
    config = GatewayConfig(line="reference", tenants=(tenant,))
    uploads = Uploads(UploadStore(Path("uploads"), hours=1.0, bytes_per_tenant=0))
    ledger = Ledger("sqlite:///:memory:")
    absent: Schema = dict.fromkeys(("arms", "workplaces", "objects"))  # nothing is answered
    renderer = load_renderer(TOKENIZER)
    return build_app(
        GatewayContext(config=config, renderer=renderer, uploads=uploads, ledger=ledger, **absent)
    ).openapi()


def gateway_reference() -> str:
    """The reference as Markdown: one section per route, then one per record that they exchange."""
    schema = gateway_schema()
    records: Schema = schema["components"]["schemas"]
    text = HEAD
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            text += f"\n## `{method.upper()} {path}`\n\n" + "\n".join(_route(operation, records))
    shown: dict[str, str] = {}
    while named := set(re.findall(r"\[(\w+)\]\(#", text + "".join(shown.values()))) - shown.keys():
        for name in named:
            about = _one_line(records[name]["description"])
            shown[name] = f"\n### {name}\n\n{about}\n\n{_table(_rows(records[name]))}"
    return text + "\n## Records\n" + "".join(shown[name] for name in sorted(shown))


def _route(operation: Schema, records: Schema) -> Iterator[str]:
    yield _one_line(operation["description"]) + "\n"
    sent = [it for it in operation.get("parameters", ()) if it["name"] != "authorization"]
    rows = [(f"`{it['name']}` ({it['in']})", it["schema"], it["required"], it) for it in sent]
    for form, body in operation.get("requestBody", {}).get("content", {}).items():
        if "$ref" in body["schema"]:
            rows = _rows(records[_name(body["schema"])]) + rows
        else:
            yield f"Body: `{form}`.\n"
    if rows:
        yield _table(rows)
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
    if "$ref" in answer.get("schema", ()):
        yield f"Answer: {_type(answer['schema'])}.\n"
    elif "204" in operation["responses"]:
        yield "Answer: 204, without a body.\n"


def _rows(record: Schema) -> list[Row]:
    required, fields = record.get("required", ()), record.get("properties", {}).items()
    return [(f"`{name}`", field, name in required, field) for name, field in fields]


def _table(rows: list[Row]) -> str:
    lines = ["| field | type | required | meaning |", "| --- | --- | --- | --- |"]
    for name, schema, required, described in rows:
        default = schema.get("default") or ""
        given = "yes" if required else f"no; default {json.dumps(default)}" if default else "no"
        kind = _type(schema) if required else _type(schema).removesuffix(" or null")
        cells = (name, kind, given, _one_line(described.get("description", "")))
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _type(schema: Schema) -> str:
    """A schema in words, with its bounds."""
    if "$ref" in schema:
        return f"[{_name(schema)}](#{_name(schema).lower()})"
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{value}`" for value in values)
    if parts := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(map(_type, parts))
    name = {"array": "list"}.get(schema.get("type", ""), schema.get("type", "any"))
    inner = schema.get("items", schema.get("additionalProperties"))
    if isinstance(inner, dict):
        kind = f"({_type(inner)})" if " or " in _type(inner) else _type(inner)
        name = f"{'list' if name == 'list' else 'map'} of {kind}"
    return ", ".join([name, *(BOUNDS[key].format(schema[key]) for key in BOUNDS if key in schema)])


def _name(schema: Schema) -> str:
    return schema["$ref"].rpartition("/")[2]


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(gateway_reference())
