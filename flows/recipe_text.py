"""A recipe as the TOML text that gives it, each setting under its description."""

import json
import textwrap
from typing import Any

from pydantic import BaseModel


def describe_recipe(recipe: BaseModel, prefix: str = "") -> str:
    """Every setting of a recipe as TOML, each under its description."""
    lines: list[str] = []
    tables: list[str] = []
    for name, field in type(recipe).model_fields.items():
        value = getattr(recipe, name)
        if isinstance(value, BaseModel):
            tables.append(f"\n[{prefix}{name}]\n{describe_recipe(value, f'{prefix}{name}.')}")
            continue
        if field.description:
            lines += [f"# {line}" for line in textwrap.wrap(field.description, 96)]
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_as_toml(value)}")
    return "\n".join([*lines, *tables])


def _as_toml(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(str(k))} = {_as_toml(v)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, frozenset | set):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return json.dumps(value)
