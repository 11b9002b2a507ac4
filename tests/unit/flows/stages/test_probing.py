"""The probes that RL begins with: named in the recipe or made from its start, and of the problems it trains on."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.flows.problem_probing import problems_for_training
from ostinato.flows.stages import chain, probing, stage
from ostinato.flows.stages.lineage import SOLVED, describe, trace
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, EvaluationResult
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import Split
from ostinato.tasks.reinforcement.records import ReinforcementRequest
from ostinato.tasks.rollout.config import PROBES_FILE
from tests.fakes.finished_stages import add_checkpoint, make_scorecard, open_context
from tests.fakes.rollouts import make_problem


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    return open_context(tmp_path, "mine", "[rollout]\ntemperature = 0.6\nmax_turns = 2\n")


def with_probes(context: StageContext, name: str | None) -> StageContext:
    return replace(context, recipe=context.recipe.with_({"rollout.curriculum.probes": name}))


def add_set(context: StageContext, made_by: str, *names: str) -> ArtifactRef:
    """A problem set of training problems, and one that no RL trains on."""
    held_out = make_problem("held-out").model_copy(update={"split": Split.HELD_OUT})

    def build(directory: Path) -> tuple[Path, dict]:
        lines = [one.model_dump_json() for one in (*map(make_problem, names), held_out)]
        return chain.one_file(directory, PROBLEMS_FILE, "\n".join(lines)), {}

    return context.ensure("problems", {"made_by": made_by}, (), build)


def add_probes(context: StageContext, problems: ArtifactRef) -> ArtifactRef:
    card = make_scorecard("reinforced/mine@1", "p", 0.5)

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, PROBES_FILE, card.model_dump_json()), {}

    return context.ensure("probing", {}, (problems, add_checkpoint(context, problems, "c")), build)


def test_probes_attempt_all_training_problems_as_rollouts_do(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = add_set(context, "one", *(f"p{number}" for number in range(130)))
    checkpoint = add_checkpoint(context, problems, "c")
    asked: list[EvaluationRequest] = []

    def run_stage(
        title: str, entry: str, request: EvaluationRequest, *_: object
    ) -> EvaluationResult:
        asked.append(request)
        card = make_scorecard(request.checkpoint_name, "p", 0.25)
        return EvaluationResult(scorecard=card, rows=(), trajectories_path="", wall_seconds=1.0)

    monkeypatch.setattr(stage, "run_stage", run_stage)
    probes = probing.probe(context, problems, checkpoint, 4)
    [request] = asked
    assert request.split is Split.TRAIN
    assert request.config.problems >= 130
    assert (request.config.attempts_per_problem, request.config.temperature) == (4, 0.6)
    assert request.harness == context.recipe.harness.model_copy(update={"max_turns": 2})
    assert context.artifacts.manifest(probes).parents == (problems, checkpoint)
    assert context.artifacts.metadata(probes)[SOLVED] == {"0 of 1": 30, "1 of 1": 10}
    assert probing.probes_for(with_probes(context, "start"), problems, checkpoint) == probes
    assert probing.probes_for(context, problems, checkpoint) is None
    assert len(asked) == 1  # found, not made again
    shown = list(describe(trace(context.settings, str(probes))))
    assert "  | 10 problems solved in 1 of 1 attempts" in shown
    assert any(str(checkpoint) in line for line in shown)


def test_reinforcement_gets_the_probes_that_the_recipe_names(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = add_set(context, "one", "p0")
    start, probes = add_checkpoint(context, problems, "c"), add_probes(context, problems)
    named = with_probes(context, str(probes))
    assert problems_for_training(named, problems, "mine", None) == problems
    asked: list[ReinforcementRequest] = []

    def run_stage(_: str, __: str, request: ReinforcementRequest, *___: object) -> None:
        asked.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "run_stage", run_stage)
    for found in (probing.probes_for(named, problems, start), None):
        with pytest.raises(KeyboardInterrupt):
            chain.reinforce(named, problems, start, found)
    folders = [request.probes_directory for request in asked]
    assert folders == [str(context.directory_of(probes)), None]


def test_probes_of_another_set_and_missing_ones_are_refused_by_name(context: StageContext) -> None:
    probed, other = add_set(context, "one", "p0"), add_set(context, "two", "p1")
    again = add_set(context, "three", "p0")  # as after a change of code that changes no problem
    probes = add_probes(context, probed)
    named = with_probes(context, str(probes))
    assert problems_for_training(named, again, "mine", None) == again
    says = f"curriculum.probes is {probes}, measured on {probed}, wanted probes of {other}"
    with pytest.raises(ConfigError, match=re.escape(says)):
        problems_for_training(named, other, "mine", None)
    with pytest.raises(ConfigError, match=r"curriculum\.probes: artifact 'probes/mine@9' is not"):
        problems_for_training(with_probes(context, "probes/mine@9"), probed, "mine", None)
