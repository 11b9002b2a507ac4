"""Environments of verifiers as ours: their prompts, turns, tools and scores; our engine's tokens."""

import asyncio
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import CallStatus, EndReason
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, EngineError
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.decode.protocol import GenerateRequest, Generation
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.environments import EnvironmentConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problems.config import EnvironmentsRequest
from ostinato.tasks.problems.environments.run import main
from ostinato.tasks.records import Outcome, Problem, Split, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.scripted_model import ScriptedModel

pytestmark = pytest.mark.verifiers
TOYS = Path(__file__).parents[1] / "fakes" / "verifiers_toys"
WORDS, SHELF = "verifiers:toy-words", "verifiers:toy-shelf"
WIDE = HarnessConfig(dialect="hermes", context_tokens=9000, max_generated_tokens=4000)


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOYS)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(
        train_tokenizer([path.read_text() for path in sorted(TOYS.glob("*.py"))], vocab_size=400)
    )


def draw(directory: Path, name: str, **counts: int) -> tuple[PreparedRepository, list[Problem]]:
    """The problems of the stage over an empty problem set, and their repository."""
    (directory / "base" / "repositories").mkdir(parents=True)
    (directory / "base" / "problems.jsonl").write_text("")
    request = EnvironmentsRequest(
        problems_directory=str(directory / "base"),
        environments={name: EnvironmentConfig(**counts)},
        seed=0,
    )
    result = Path(main(request, Workspace.open(directory, Settings(home=directory))).directory)
    lines = (result / "problems.jsonl").read_text().splitlines()
    repository = PreparedRepository.load(result / "repositories" / name.replace(":", "-"))
    return repository, [Problem.model_validate_json(line) for line in lines]


def answer_of(problem: Problem) -> str:
    return json.loads(problem.facts["row"])["answer"]


class SlowModel(ScriptedModel):
    """A model that takes turns of the event loop, as engines do."""

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        for _ in range(20):
            await asyncio.sleep(0)
        return generation


def roll_out(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    answers: Sequence[str | Exception],
    harness: HarnessConfig = WIDE,
) -> tuple[Trajectory, ScriptedModel]:
    """One attempt of a rollout worker by a scripted model."""
    model = SlowModel(renderer, answers)

    async def run() -> Trajectory:
        worker = RolloutWorker(
            converse=partial(run_agent, model, renderer),
            harness=harness,
            sandboxes=Sandboxes([repository], concurrent_trajectories=1),
            grade=make_grader(GradingConfig()),
            clock=time.monotonic,
        )
        try:
            return await worker.attempt(AttemptRequest("g.t0", "g", problem, 0, 0, 1))
        finally:
            await worker.close()

    return asyncio.run(run()), model


def test_a_recipe_names_it_alone_or_with_counts(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'extends = "miniature"\nname = "mine"\nenvironments = ["{WORDS}"]\n')
    assert load_recipe(str(recipe)).environments == {WORDS: EnvironmentConfig()}
    recipe.write_text(f'extends = "miniature"\nname = "m"\n[environments."{WORDS}"]\ntrain = 3\n')
    assert load_recipe(str(recipe)).environments == {WORDS: EnvironmentConfig(train=3)}
    recipe.write_text(f'extends = "mini_swe_agent"\nname = "m"\nenvironments = ["{WORDS}"]\n')
    with pytest.raises(ConfigError, match="runs the dialogue itself"):
        load_recipe(str(recipe))


def test_rows_of_both_data_sets_become_problems(tmp_path: Path) -> None:
    _, problems = draw(tmp_path, WORDS, train=4, held_out=2)
    by_split = {
        split: {answer_of(each) for each in problems if each.split is split} for split in Split
    }
    assert by_split[Split.TRAIN] == {"plum", "pear", "fig", "kiwi"}
    assert by_split[Split.HELD_OUT] == {"lime", "date"}
    assert {problem.prompt for problem in problems} >= {"Guess a fruit of 3 letters."}


def test_the_environment_holds_the_turns_and_scores_them(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, WORDS, train=4, held_out=0)
    problem = next(each for each in problems if answer_of(each) == "plum")
    trajectory, model = roll_out(renderer, repository, problem, ["pear", "plan", "plum"])

    assert trajectory.outcome is Outcome.FINISHED, trajectory.reason
    assert trajectory.reward.total == pytest.approx(1.0 + 0.2 * 0.5)
    assert trajectory.verdict is not None
    assert trajectory.verdict.passed
    assert trajectory.transcript.score.metrics == {
        "is_right": 1.0,
        "few_guesses": 0.5,
        "num_turns": 3.0,
    }
    asked = renderer.decode(model.requests[-1].token_ids)
    assert "Answer with one word." in asked
    assert "Not pear: p---" in asked
    assert "Not plan: pl--" in asked


def test_sampled_tokens_are_the_trained_ones(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, WORDS, train=4, held_out=0)
    trajectory, model = roll_out(
        renderer, repository, problems[0], ["pear ", " lime", "fog", "dog"]
    )
    (segment,) = trajectory.transcript.segments
    for request, answer in zip(model.requests, model.answers, strict=True):
        start, sampled = len(request.token_ids), renderer.encode_answer(answer)
        assert segment.token_ids_T[:start].tolist() == list(request.token_ids)
        assert segment.token_ids_T[start : start + len(sampled)].tolist() == sampled
        assert segment.loss_mask_T[start : start + len(sampled)].all()
    assert segment.sampled_tokens == sum(
        turn.generated_tokens for turn in trajectory.transcript.turns
    )
    assert np.isfinite(segment.logprobs_T).all()


def test_tools_of_the_environment_are_called_through_the_dialect(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, SHELF, train=2, held_out=0)
    problem = next(each for each in problems if answer_of(each) == "12")
    call = (
        '<tool_call>\n{"name": "count", "arguments": {"thing": "%s", "places": null}}\n</tool_call>'
    )
    answers = [f"Look.\n{call % 'figs'}{call % 'nuts'}", "There are 12."]
    trajectory, model = roll_out(renderer, repository, problem, answers)

    assert trajectory.reward.total == 1.0, trajectory.reason
    turn = trajectory.transcript.turns[0]
    assert [each.status for each in turn.calls] == [CallStatus.OK] * 2
    assert turn.results == ("12", "'no nuts here'")
    assert '"name": "count"' in renderer.decode(model.requests[0].token_ids)


def test_a_limit_of_the_harness_ends_it_and_it_is_scored(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, WORDS, train=4, held_out=0)
    harness = WIDE.model_copy(update={"max_turns": 2})
    trajectory, _ = roll_out(renderer, repository, problems[0], ["a", "b"], harness)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert trajectory.transcript.end_reason is EndReason.TURN_LIMIT
    assert trajectory.reward.total == pytest.approx(0.2 * 0.75)
    assert not trajectory.verdict.passed


def test_a_fault_of_the_engine_is_no_reward(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, WORDS, train=4, held_out=0)
    trajectory, _ = roll_out(renderer, repository, problems[0], ["a", EngineError("gone")])
    assert trajectory.outcome is Outcome.ENGINE_FAILED
    assert trajectory.verdict is None


def test_history_that_is_not_the_models_own_begins_a_further_segment(tmp_path, renderer) -> None:
    repository, problems = draw(tmp_path, "verifiers:toy-forgetful", train=1, held_out=0)
    trajectory, model = roll_out(renderer, repository, problems[0], ["one", "two", "three"])
    assert trajectory.outcome is Outcome.FINISHED, trajectory.reason
    segments = trajectory.transcript.segments
    assert [segment.sampled_tokens for segment in segments] == [
        len(renderer.encode_answer(text)) for text in ("one", "two", "three")
    ]
    assert "You said ONE." in renderer.decode(model.requests[1].token_ids)
    assert len({request.session_id for request in model.requests}) == 3
    assert trajectory.reward.total == 1.0


def test_parallel_requests_of_an_environment_are_all_trained(tmp_path: Path, renderer) -> None:
    repository, problems = draw(tmp_path, "verifiers:toy-parallel", train=1, held_out=0)
    texts = ["one", "two", "three"]
    trajectory, model = roll_out(renderer, repository, problems[0], texts)
    assert trajectory.outcome is Outcome.FINISHED, trajectory.reason
    transcript = trajectory.transcript
    assert [turn.text for turn in transcript.turns] == texts
    sampled = [segment.token_ids_T[segment.loss_mask_T].tolist() for segment in transcript.segments]
    assert sampled == [renderer.encode_answer(text) for text in texts]
    for segment, request in zip(transcript.segments, model.requests, strict=True):
        assert tuple(segment.token_ids_T[: len(request.token_ids)].tolist()) == request.token_ids


def own_reward(name: str, text: str, row: dict) -> float:
    """What the package's function says of an answer, without verifiers."""
    if name == "sophistry-bench-sprint":
        import sophistry_bench_sprint as bench

        claims, citations = bench._parse_claims(text), bench._parse_citations(text)
        return bench._aggregate_reward(claims, citations, str(row["info"]))
    from stardata.envs.constraint_gym import prosody_reward
    from verifiers.types import AssistantMessage

    return prosody_reward([AssistantMessage(content=text)], info=row["info"])


@pytest.mark.parametrize("name", ["sophistry-bench-sprint", "stardata.envs.constraint_gym"])
def test_environments_of_the_package_index_run_as_they_are(
    tmp_path: Path, renderer, name: str
) -> None:
    repository, problems = draw(tmp_path, f"verifiers:{name}", train=3, held_out=1)
    text = "We went where the green stems swept.\nBees slept, we dreamt.\nThe eve ended."
    trajectory, _ = roll_out(renderer, repository, problems[0], [text])
    assert trajectory.outcome is Outcome.FINISHED, trajectory.reason
    assert trajectory.transcript.score.metrics["num_turns"] == 1.0
    row = json.loads(problems[0].facts["row"])
    assert trajectory.reward.total == pytest.approx(own_reward(name, text, row), abs=1e-6)
