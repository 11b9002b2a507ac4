"""A suite the way a user goes: made from a problem set by a command, named to `evaluate`, and reported by slice."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands.run_flow import main as run_flow
from ostinato.flows.python_api import Home
from ostinato.flows.reporting.evaluations import (
    PARETO_PICTURE,
    EvaluationReport,
    evaluation_as_markdown,
)
from ostinato.flows.reporting.suite_report import ALL, frontier
from ostinato.flows.stages import chain
from ostinato.flows.stages.declared import EVALUATION
from ostinato.flows.stages.stage import StageContext
from ostinato.flows.stages.suites import open_suite, publish_suite
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, EvaluationResult
from ostinato.tasks.evaluation.checkpoint.run import make_scorecard
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.evaluation.statistics import AttemptRow
from ostinato.tasks.records import Split
from tests.fakes.finished_stages import add_checkpoint, add_problems, open_context
from tests.fakes.miniature import make_checkpoint, make_problem_set
from tests.fakes.processes import run_command

RECIPE = """
[cycle.gate]
margin = 1.0
floor = 0.0
minimum_problems = 2
[cycle.gate.slice_margins]
bug = 0.9
[prices."reinforced/*"]
input_usd_per_million_tokens = 1.0
output_usd_per_million_tokens = 10.0
"""


def make_suite(tmp_path: Path, home: Path, *options: str) -> dict:
    """Answer of the command that makes the suite `tiny` in the home."""
    problems = make_problem_set(tmp_path / "set", Split.HELD_OUT)
    arguments = ["problems", "suite", str(problems), "--to", str(home / "suites/tiny"), "--json"]
    made = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
    assert made.exit_code == 0
    return json.loads(made.stdout)


def add_evaluation(
    context: StageContext, scored: ArtifactRef, solved: int, tokens: int, prompt_tokens: int | None
) -> None:
    """The finished evaluation of a checkpoint on the suite `tiny`, by the stage's own scoring."""
    opened = open_suite(context.settings, "tiny", GateConfig())
    assert opened is not None
    suite = publish_suite(context, *opened)
    config = context.recipe.evaluation.model_copy(update={"problems": 4})
    fields = chain.evaluation_fields(context, scored, None)
    fields |= {"suite": opened[0].title, "config": config, "checkpoint_directory": ""}
    fields |= {"problems_directory": str(context.directory_of(suite))}
    request = EVALUATION.request_of(context.recipe, fields)
    assert isinstance(request, EvaluationRequest)
    rows = tuple(
        AttemptRow(
            problem_id=f"pkg-{number}", attempt=attempt, solved=number < solved, generated_tokens=tokens, turns=3,
            tool_calls=4, broken_calls=0, prompt_tokens=prompt_tokens, changed_lines=1, seconds=2.0,
        )
        for number in range(4)
        for attempt in range(2)
    )  # fmt: skip

    def build(directory: Path) -> tuple[Path, dict]:
        (directory / "trajectories.jsonl").write_text("")
        result = EvaluationResult(
            scorecard=make_scorecard(request, rows),
            rows=rows,
            trajectories_path=str(directory / "trajectories.jsonl"),
            wall_seconds=1.0,
        )
        overlap = chain.overlap_of(context, scored, suite, None)
        chain.keep_scorecard(context, scored, result, overlap, directory / "published")
        return directory / "published", {}

    context.ensure("evaluation", EVALUATION.identity_of(request), (suite, scored), build)


def evaluate(
    recipe: Path, report: Path, **parameters: object
) -> tuple[int, EvaluationReport | None]:
    given = {"suite": "tiny", "report_directory": str(report), **parameters}
    arguments = [
        "checkpoint_evaluation",
        "--recipe",
        str(recipe),
        "--parameters",
        json.dumps(given),
    ]
    code, file = run_flow(arguments), report / "scorecard.json"
    return code, EvaluationReport.model_validate_json(file.read_bytes()) if file.is_file() else None


def test_a_suite_is_made_by_a_command_and_two_checkpoints_are_compared_by_slice(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    made = make_suite(tmp_path, home)
    assert made["slices"] == {"bug": 4}
    context = open_context(tmp_path, "mine", RECIPE)
    problems = add_problems(context, "a")
    old, new = (add_checkpoint(context, problems, name) for name in ("old", "new"))
    add_evaluation(context, old, solved=1, tokens=50, prompt_tokens=1000)
    add_evaluation(context, new, solved=3, tokens=100, prompt_tokens=1000)

    code, report = evaluate(
        tmp_path / "mine.toml", tmp_path / "report", checkpoint=str(new), against=str(old)
    )
    assert code == 0
    assert report is not None
    assert report.suite == made["suite"]
    assert [card.slices["bug"].average.mean for card in report.scorecards] == [0.75, 0.25]
    assert report.figures is not None
    assert {name: found.mean for name, found in report.figures.differences.items()} == {
        ALL: 0.5, "bug": 0.5,
    }  # fmt: skip
    assert [costs["bug"] for costs in report.figures.costs_usd] == [0.002, 0.0015]
    assert report.figures.points.keys() == {str(old), str(new)}
    assert report.figures.cost_unit == "USD per attempt"
    assert (tmp_path / "report" / PARETO_PICTURE).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report/scorecard.md").read_text()
    assert f"| bug | {new} | 4 | 75.0% [" in text
    assert "| 1.0 | 100.0 | 4.0 | 3.0 | 2.0 | 0.002 |" in text
    assert "| bug | 4 | +50.0 [" in text
    assert report.decision is not None
    assert "slice_bug" in [check.name for check in report.decision.checks]

    again = (tmp_path / "mine.toml").read_text().replace("bug = 0.9", "bug = 0.1")
    (tmp_path / "mine.toml").write_text(again)
    code, report = evaluate(
        tmp_path / "mine.toml", tmp_path / "worse", checkpoint=str(old), against=str(new)
    )
    assert code == 1
    assert report is not None
    assert report.decision is not None
    assert "slice bug 75.0 % -> 25.0 %: difference -50.0 points" in report.decision.reason


def test_an_endpoint_has_slices_beside_a_checkpoint(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    make_suite(tmp_path, home)
    context = open_context(tmp_path, "mine", RECIPE)
    mine = add_checkpoint(context, add_problems(context, "a"), "mine")
    outside = Endpoint(url="http://127.0.0.1:1/v1", model="m")
    add_evaluation(context, mine, solved=1, tokens=50, prompt_tokens=1000)
    stands_for = chain.endpoint_artifact(context, outside)
    add_evaluation(context, stands_for, solved=2, tokens=70, prompt_tokens=None)
    given = {"endpoint": outside.model_dump(mode="json"), "against": str(mine)}
    code, report = evaluate(tmp_path / "mine.toml", tmp_path / "report", **given)
    assert code == 0
    assert report is not None
    assert report.figures is not None
    assert report.decision is None
    assert report.figures.differences["bug"].mean == 0.25
    assert report.figures.costs_usd[0] == {ALL: None, "bug": None}
    assert report.figures.cost_unit == "generated tokens per attempt"
    assert report.figures.points[outside.title][0] == 70
    assert "| not measured |" in evaluation_as_markdown(report)


@pytest.mark.parametrize(
    ("suite", "margins", "message"),
    [
        ("tiny", {"refactor": 0.1}, r"slice_margins names refactor, and suite tiny@1-\w+ has the slices bug"),
        ("both", {"bug": 0.1}, "slice_margins names bug, and split both has the slices none"),
        ("other", {}, r"suite 'other': no folder with suite\.toml .*wanted one of the splits held-out-mut"),
    ],
)  # fmt: skip
def test_a_suite_that_does_not_fit_is_refused_before_anything_starts(
    home: Path, tmp_path: Path, suite: str, margins: dict[str, float], message: str
) -> None:
    make_suite(tmp_path, home)
    context = open_context(tmp_path, "mine")
    checkpoint = add_checkpoint(context, add_problems(context, "a"), "c")
    gate = context.recipe.cycle.gate.model_copy(update={"slice_margins": margins})
    cycle = context.recipe.cycle.model_copy(update={"gate": gate})
    recipe = context.recipe.model_copy(update={"cycle": cycle})
    with pytest.raises(ConfigError, match=message):
        Home(load_settings()).evaluate(str(checkpoint), recipe, suite=suite)


def test_a_changed_suite_and_a_set_without_problems_are_refused(home: Path, tmp_path: Path) -> None:
    make_suite(tmp_path, home, "--version", "2", "--max-per-slice", "2")
    opened = open_suite(load_settings(), "tiny", GateConfig())
    assert opened is not None
    assert (opened[0].version, opened[0].problems) == (2, 2)
    (home / "suites/tiny/problems.jsonl").write_text("")
    with pytest.raises(ProblemError, match=r"problems\.jsonl differ from what"):
        open_suite(load_settings(), str(home / "suites/tiny"), GateConfig())
    arguments = ["problems", "suite", str(tmp_path / "set"), "--to", str(tmp_path / "new")]
    with pytest.raises(ProblemError, match="0 problems of split user and none of a slice"):
        CliRunner().invoke(app, [*arguments, "--split", "user"], catch_exceptions=False)
    assert not (tmp_path / "new").exists()


def test_the_frontier_holds_models_that_no_cheaper_one_equals() -> None:
    points = [(3.0, 0.5), (1.0, 0.2), (2.0, 0.2), (4.0, 0.4), (1.0, 0.1), (5.0, 0.6)]
    assert list(frontier(points)) == [(1.0, 0.2), (3.0, 0.5), (5.0, 0.6)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_tiny_model_attempts_every_problem_of_a_suite(home: Path, tmp_path: Path) -> None:
    make_suite(tmp_path, home)
    context = open_context(tmp_path, "mine", RECIPE)
    checkpoint = context.ensure(
        "reinforcement", {}, (), lambda folder: (make_checkpoint(folder / "made"), {})
    )
    arguments = ["evaluate", "--checkpoint", str(checkpoint), "--suite", str(home / "suites/tiny")]
    arguments += [
        "--recipe",
        str(tmp_path / "mine.toml"),
        "--json",
        "--set",
        "evaluation.problems=1",
    ]
    done = run_command(home, *arguments, timeout=500)
    assert done.returncode == 0, done.stderr
    report = EvaluationReport.model_validate(json.loads(done.stdout))
    [card] = report.scorecards
    assert card.slices["bug"].problem_ids == ("pkg-0", "pkg-1", "pkg-2", "pkg-3")
    assert card.slices["bug"].average == card.average
    assert report.figures is not None
    assert report.figures.costs_usd[0][ALL] is not None
