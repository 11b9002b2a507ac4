"""Problem set and budget in the forms of the main flows: what a person fills in reaches the stage that reads it."""

import json
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State

from ostinato.flows.agent_training import agent_training
from ostinato.flows.checkpoint_evaluation import checkpoint_evaluation
from ostinato.flows.promotion import promotion
from ostinato.flows.realtime_cycle import realtime_cycle
from ostinato.flows.reinforcement import reinforcement
from ostinato.flows.reporting.evaluations import EvaluationReport
from ostinato.flows.stages.forms import RunOptions, Suite
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.finished_stages import add_checkpoint, add_problems, add_scorecard, open_context

TAKES_PROBLEMS = (
    agent_training,
    realtime_cycle,
    checkpoint_evaluation,
    promotion,
    reinforcement,
)


@pytest.mark.parametrize("flow", TAKES_PROBLEMS, ids=lambda flow: flow.name)
def test_form_takes_a_problem_set_by_its_name(flow) -> None:
    [by_name] = [
        kind for kind in flow.parameters.properties["problems"]["anyOf"] if "pattern" in kind
    ]
    assert by_name["title"] == "Problem set"
    assert "reinforced" not in by_name["pattern"]


@pytest.mark.parametrize(
    "flow", [agent_training, realtime_cycle, reinforcement], ids=lambda flow: flow.name
)
def test_form_takes_a_budget_above_zero(flow) -> None:
    seconds, absent = flow.parameters.properties["budget_seconds"]["anyOf"]
    assert (seconds["exclusiveMinimum"], absent["type"]) == (0, "null")


def test_budget_of_the_form_goes_over_every_other_word() -> None:
    options = RunOptions.model_validate(
        {
            "settings": "reinforcement.budget_seconds = 5",
            "overrides": ["reinforcement.budget_seconds=6"],
        }
    )
    assert options.with_setting("reinforcement.budget_seconds", None) == options
    given = options.with_setting("reinforcement.budget_seconds", 7.5)
    assert given.recipe_of("miniature").reinforcement.budget_seconds == 7.5


@pytest.mark.nightly
def test_budget_reaches_the_stage_of_rl(prefect_server: None, home: Path, tmp_path: Path) -> None:
    context = open_context(tmp_path, "mine")
    problems = add_problems(context, "a")
    start = add_checkpoint(context, problems, "start")
    reinforcement(
        str(tmp_path / "mine.toml"),
        problems=str(problems),
        start=str(start),
        budget_seconds=7,
        return_state=True,  # it fails: nobody can load that checkpoint
    )
    [request] = home.glob("runs/mine-seed0/reinforced-*/request.json")
    assert json.loads(request.read_text())["request"]["budget_seconds"] == 7


def test_cycle_without_time_for_its_gate_is_refused(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    open_context(tmp_path, "mine", '[serving]\nline = "tests"\n')
    with pytest.raises(ConfigError, match="less than deadline_seconds, 60"):
        realtime_cycle(str(tmp_path / "mine.toml"), budget_seconds=60)


@pytest.mark.parametrize("flow", TAKES_PROBLEMS, ids=lambda flow: flow.name)
@pytest.mark.sampled(2)
def test_what_is_no_problem_set_is_refused_before_a_stage_starts(
    prefect_server: None, home: Path, tmp_path: Path, flow
) -> None:
    context = open_context(tmp_path, "mine", '[serving]\nline = "tests"\n')
    checkpoint = add_checkpoint(context, add_problems(context, "a"), "a")
    state: State = flow(str(tmp_path / "mine.toml"), problems=str(checkpoint), return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, ConfigError)
    assert "reinforced/mine@1 is not a problem set" in str(error)
    assert list(home.glob("runs/*/*/child.pid")) == []


def test_evaluation_scores_on_the_problem_set_that_the_form_names(
    prefect_server: None, home: Path, tmp_path: Path
) -> None:
    context = open_context(tmp_path, "mine")
    first, second = add_problems(context, "a"), add_problems(context, "b")
    checkpoint = add_checkpoint(context, first, "a")
    for problems, rate in ((first, 0.25), (second, 0.75)):
        add_scorecard(context, problems, checkpoint, rate)
        checkpoint_evaluation(
            str(tmp_path / "mine.toml"),
            problems=str(problems),
            suite=Suite.MUTATIONS,
            report_directory=str(tmp_path / "report"),
        )
        written = (tmp_path / "report/scorecard.json").read_bytes()
        [card] = EvaluationReport.model_validate_json(written).scorecards
        assert card.average.mean == rate
