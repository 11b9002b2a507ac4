"""prefect.yaml: every flow is deployable, and no key of it is one that Prefect would ignore in silence."""

from importlib import import_module
from pathlib import Path

import yaml

from ostinato.flows.operating.local_prefect import flow_names

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
    assert set(flow_names()) == written


def test_deployments_name_flows_that_exist_with_their_parameters() -> None:
    for item in deployments():
        module, _, name = item["entrypoint"].rpartition(".")
        flow = getattr(import_module(module), name)
        assert set(item["parameters"]) <= set(flow.parameters.properties)


def test_deployments_have_no_key_that_would_be_ignored() -> None:
    for item in deployments():
        assert set(item) <= KNOWN_KEYS


def test_deployment_of_the_cycle_drops_a_second_run() -> None:
    [cycle] = [item for item in deployments() if "realtime_cycle" in item["entrypoint"]]
    assert cycle["concurrency_limit"]["limit"] == 1
    assert cycle["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    assert cycle["schedules"][0]["interval"] == 5 * 3600
