"""prefect.yaml: every flow is deployable, and no key of it is one that Prefect would ignore in silence."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from ostinato.flows.operating.local_prefect import flow_names
from ostinato.flows.recipe import recipe_names

ROOT = Path(__file__).parents[2]
KNOWN_KEYS = {
    "name",
    "entrypoint",
    "description",
    "parameters",
    "work_pool",
    "concurrency_limit",
    "tags",
    "schedules",
    "triggers",
}


def deployments() -> list[dict]:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def test_deployments_cover_every_flow_and_no_other() -> None:
    written = {
        path.stem for path in (ROOT / "flows").glob("*.py") if "\n@flow(" in path.read_text()
    }
    deployed = {item["entrypoint"].rpartition(".")[2] for item in deployments()}
    assert deployed == written
    assert set(flow_names()) == deployed - {"promotion", "rollback", "run_resuming"}


def test_no_two_deployments_have_the_same_name() -> None:
    """Prefect's list shows the name in large letters, and the flow below it in small ones."""
    names = [item["name"] for item in deployments()]
    assert len(set(names)) == len(names)


def test_deployments_name_flows_that_exist_with_their_parameters() -> None:
    for item in deployments():
        module, _, name = item["entrypoint"].rpartition(".")
        flow = getattr(import_module(module), name)
        assert set(item["parameters"]) <= set(flow.parameters.properties)


def test_runs_of_every_flow_have_names_of_ours() -> None:
    """Prefect names the others after animals."""
    entrypoints = {item["entrypoint"].rpartition(".") for item in deployments()}
    flows = [getattr(import_module(module), name) for module, _, name in sorted(entrypoints)]
    assert [flow.name for flow in flows if flow.flow_run_name is None] == []


def _undescribed(schema: Any, place: str = "") -> list[str]:
    """Every setting of a form, however deep, that has no description."""
    if isinstance(schema, list):
        return [name for part in schema for name in _undescribed(part, place)]
    if not isinstance(schema, dict):
        return []
    found: list[str] = []
    for key in ("properties", "definitions"):
        for name, inner in schema.get(key, {}).items():
            if key == "properties" and not inner.get("description"):
                found.append(f"{place}.{name}")
            found += _undescribed(inner, f"{place}.{name}")
    for key in ("anyOf", "oneOf", "allOf", "items", "prefixItems", "additionalProperties"):
        found += _undescribed(schema.get(key), place)
    return found


@pytest.mark.parametrize("entrypoint", sorted({item["entrypoint"] for item in deployments()}))
def test_form_of_a_flow_describes_every_parameter(entrypoint: str) -> None:
    module, _, name = entrypoint.rpartition(".")
    form = getattr(import_module(module), name).parameters
    assert _undescribed(form.model_dump()) == []
    options = form.properties.get("options")
    if options is not None:
        assert options["anyOf"] == [{"$ref": "#/definitions/RunOptions"}, {"type": "null"}]
        shown = form.definitions["RunOptions"]
        assert shown["additionalProperties"] is False
        assert all(value["title"] for value in shown["properties"].values())
        assert len(shown["properties"]) <= 12, "a person reads the form on one screen"
    if "recipe" in form.properties:
        menu, path = form.properties["recipe"]["anyOf"]
        assert menu["enum"] == recipe_names()
        assert path["type"] == "string"


def test_deployments_have_no_key_that_would_be_ignored() -> None:
    for item in deployments():
        assert set(item) <= KNOWN_KEYS


def test_deployment_of_the_cycle_drops_a_second_run() -> None:
    [cycle] = [item for item in deployments() if "realtime_cycle" in item["entrypoint"]]
    assert cycle["concurrency_limit"]["limit"] == 1
    assert cycle["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    assert cycle["schedules"][0]["interval"] == 5 * 3600
