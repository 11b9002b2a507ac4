"""Evaluation by name: it trains nothing, says what is missing, and its exit code tells a failed gate from a broken run."""

import json
from pathlib import Path

import httpx2
import pytest
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL

from ostinato.flows.checkpoint_evaluation import SKIPPED, checkpoint_evaluation
from ostinato.flows.commands.run_flow import main as run_flow
from ostinato.flows.operating.local_prefect import deployments
from ostinato.flows.reporting.evaluations import EvaluationReport
from ostinato.flows.stages import chain
from ostinato.flows.stages.forms import RunOptions, Suite
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.finished_stages import (
    add_checkpoint,
    add_own_problems,
    add_scorecard,
    open_context,
)
from tests.fakes.prefect_here import wait_until

SUITE = Suite.MUTATIONS.value
# what tests/fakes/finished_stages.py makes is found although the recipe names other problems
SHIPPED = "problems"


def prepare(directory: Path, *solve_rates: float, text: str = "") -> tuple[str, list[str]]:
    """Path of a recipe and the names of checkpoints that were scored before."""
    context = open_context(directory, "mine", f"[cycle.gate]\nmargin = 0.1\nfloor = 0.2\n{text}")
    problems = add_own_problems(
        context, lambda folder: (_file(folder), {"summary": problems_result()})
    )
    names = []
    for number, rate in enumerate(solve_rates):
        made = add_checkpoint(context, problems, f"c{number}")
        add_scorecard(context, problems, made, rate)
        names.append(str(made))
    return str(directory / "mine.toml"), names


def _file(folder: Path) -> Path:
    place = folder / "published"
    place.mkdir()
    (place / "problems.jsonl").write_text("")
    return place


def problems_result() -> dict:
    return {
        "directory": "",
        "num_problems": 0,
        "num_candidates": 0,
        "yield_ratio": 0.0,
        "repositories": {},
        "seconds": 0.0,
        "operators": {},
        "kinds": {},
        "split_sizes": {},
        "yield_table": [],
        "left_out": {},
    }


def evaluate(recipe: str, checkpoint: str, report: Path, **other: object) -> int:
    parameters = {
        "checkpoint": checkpoint,
        "suite": SUITE,
        "report_directory": str(report),
        "commit": "3f2a",
        **other,
    }
    return run_flow(
        ["checkpoint_evaluation", "--recipe", recipe, "--parameters", json.dumps(parameters)]
    )


def test_gate_decides_the_exit_code_and_the_report_names_what_was_compared(
    prefect_server: None, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, [weak, strong] = prepare(tmp_path, 0.3, 0.6)
    for checkpoint, against, code in ((strong, weak, 0), (weak, strong, 1)):
        report = tmp_path / f"report-{code}"
        assert evaluate(recipe, checkpoint, report, against=against) == code
        read = EvaluationReport.model_validate_json((report / "scorecard.json").read_bytes())
        assert (read.checkpoint, read.against, read.commit) == (checkpoint, against, "3f2a")
        assert read.decision.passed == (code == 0)
        assert f"`{checkpoint}`" in (report / "scorecard.md").read_text()
        assert f"compared with {against}" in capsys.readouterr().err
        assert read.in_training_text == ("not known",)  # made from no corpus


def test_an_outside_baseline_stands_beside_a_checkpoint_and_is_not_judged(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    recipe, [mine] = prepare(tmp_path, 0.3)
    context = StageContext.open(recipe)
    outside = Endpoint(url="http://127.0.0.1:1/v1", model="m")
    (problems,) = context.artifacts.manifest(context.artifacts.get(mine)).parents
    add_scorecard(context, problems, chain.endpoint_artifact(context, outside), 0.6)
    report = tmp_path / "report"
    given = outside.model_dump(mode="json")
    assert evaluate(recipe, "newest", report, against=mine, endpoint=given) == 0
    read = EvaluationReport.model_validate_json((report / "scorecard.json").read_bytes())
    assert (read.checkpoint, read.against, read.decision) == (outside.title, mine, None)
    assert [card.average.mean for card in read.scorecards] == [0.6, 0.3]
    text = (report / "scorecard.md").read_text()
    assert "Outside baseline" in text
    assert f"| {mine} |" in text


def test_an_outside_baseline_of_a_foreign_program_is_refused(home: Path) -> None:
    outside = Endpoint(url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match=r"endpoint is given with .* 'mini_swe_agent'"):
        chain.endpoint_artifact(StageContext.open("mini_swe_agent"), outside)


@pytest.mark.parametrize(
    "checkpoint", ["newest", "champion", "reinforced/mine@7", "problems/mine@1"]
)
@pytest.mark.sampled(1)
def test_missing_checkpoint_is_an_error_that_starts_no_stage(
    prefect_server: None, home: Path, tmp_path: Path, checkpoint: str
) -> None:
    recipe, _ = prepare(tmp_path)
    state: State = checkpoint_evaluation(
        recipe, checkpoint=checkpoint, options=RunOptions(), return_state=True
    )
    assert isinstance(state.result(raise_on_failure=False), ConfigError)
    assert list(home.glob("runs/*/*/child.pid")) == []
    assert evaluate(recipe, checkpoint, tmp_path / "report") == 2


def test_nightly_evaluation_of_a_home_without_a_checkpoint_ends_well_and_says_why(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    recipe, _ = prepare(tmp_path)
    [nightly] = [item for item in deployments() if item["name"] == "nightly"]
    parameters = nightly["parameters"] | {"recipe": recipe}
    state: State = checkpoint_evaluation(**parameters, return_state=True)
    assert (state.is_completed(), state.name) == (True, SKIPPED)
    assert str(state.message).startswith("nothing to evaluate yet: recipe mine has no trained")
    wanted = {"filter": {"event": {"name": ["evaluation.skipped"]}}}

    def told() -> list[dict]:
        found = httpx2.post(f"{PREFECT_API_URL.value()}/events/filter", json=wanted)
        return found.raise_for_status().json()["events"]

    [event] = wait_until("the event", told, 60)
    assert event["payload"]["reason"] == state.message

    recipe, _ = prepare(tmp_path, 0.6)
    parameters |= {"suite": SUITE}
    state = checkpoint_evaluation(**parameters, return_state=True)
    assert (state.is_completed(), state.name) == (True, "Completed")
