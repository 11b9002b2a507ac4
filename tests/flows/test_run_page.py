"""The page of a flow run in Prefect's UI: our log lines with the child's log, a name, keys, events."""

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from ostinato.flows.operating import local_prefect
from ostinato.flows.stages.naming import as_key
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import open_api, wait_until

PROGRAM = """
import sys
from pathlib import Path
from prefect import flow
from ostinato.flows.stages import realtime
from ostinato.flows.stages.child_task import run_stage
from ostinato.flows.stages.naming import run_name
from tests.fakes.finished_stages import (
    add_checkpoint, add_problems, add_scorecard, open_context,
)
from tests.unit.infra.platform.cluster.entries import CountRequest, CountResult

LINE = '[serving]\\nline = "mine"\\n[cycle.gate]\\nfloor = 0.05\\nmargin = 0.05\\n'
COUNT = "tests.unit.infra.platform.cluster.entries:count"

@flow(name="counting", flow_run_name=run_name)
def counting(directory: str, recipe: str, seed: int | None = None) -> None:
    request = CountRequest(steps=3, seconds_a_step=2.0)
    run_stage("counting", COUNT, request, CountResult, Path(directory))
    context = open_context(Path(directory), "mine", LINE)
    problems = add_problems(context, "a")
    for name, solve_rate in (("good", 0.9), ("bad", 0.1)):
        checkpoint = add_checkpoint(context, problems, name)
        add_scorecard(context, problems, checkpoint, solve_rate)
        realtime.offer(context, problems, checkpoint)

counting(sys.argv[1], "miniature", 4)
"""
EVENTS = {
    "checkpoint.created": {"1", "2"},
    "checkpoint.gate.passed": {"1"},
    "checkpoint.promoted": {"1"},
    "checkpoint.gate.failed": {"2"},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_page_of_a_run_holds_our_lines_and_names_recipe_and_seed(tmp_path: Path) -> None:
    work = tmp_path / "miniature-seed4" / "work"
    work.mkdir(parents=True)
    settings = Settings(home=tmp_path, prefect_port=1)
    with local_prefect.server(settings, Console(stderr=True)) as (environment, await_server):
        await_server()
        environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OSTINATO_TRACKERS": "tensorboard",
        }
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        command = [sys.executable, "-P", str(program), str(work)]
        subprocess.run(command, env=environment, check=True)
        numbers = settings.home / "tensorboard" / "miniature-seed4" / "work"
        assert len([*numbers.glob("events.*")]) == 1  # whoever waits for the flow has them
        with open_api(environment) as api:
            wait_until(
                "a line with the child's log",
                lambda: any(f"log={work / 'child.log'}" in line for line in _our_lines(api)),
                120,
            )
            runs = api.post("flow_runs/filter", json={}).raise_for_status().json()
            wait_until("events of two offers", lambda: _events(api) == EVENTS, 120)
            shown = api.post("artifacts/filter", json={}).raise_for_status().json()
    assert "miniature-seed4 counting" in {run["name"] for run in runs}
    texts = {item["key"]: item["data"] for item in shown}
    assert texts.keys() == {"miniature-seed4-counting", "miniature-seed4-lineage"}
    for word in ("reinforced/mine@1", "promoted on line mine", "problems/mine@1"):
        assert word in texts["miniature-seed4-lineage"]


def _our_lines(api: httpx2.Client) -> list[str]:
    rows = api.post("logs/filter", json={"limit": 200}).raise_for_status().json()
    return [row["message"] for row in rows if row["name"].startswith("ostinato.")]


def _events(api: httpx2.Client) -> dict[str, set[str]]:
    """Checkpoints by event that have come so far."""
    wanted = {"filter": {"event": {"prefix": ["checkpoint."]}}, "limit": 50}
    found: dict[str, set[str]] = {}
    for event in api.post("events/filter", json=wanted).raise_for_status().json()["events"]:
        checkpoint = event["resource"]["prefect.resource.id"].rpartition("@")[2]
        found.setdefault(event["event"], set()).add(checkpoint)
    return found


def test_key_has_only_what_prefect_takes() -> None:
    assert as_key("My recipe-seed0", "held_out, 2") == "my-recipe-seed0-held-out-2"
    assert as_key("", "gate") == "gate"
