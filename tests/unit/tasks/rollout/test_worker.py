"""One trajectory in a real box with real tests; only the model is scripted."""

import time
from functools import partial

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import CodePlace, Outcome, Problem, Trajectory, WantedReply
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import MAX_CHANGED_FILES, RolloutWorker
from tests.fakes.answering_model import AnsweringModel

READ_AND_TEST = "<run_terminal>pytest</run_terminal><read_file>pkg/code.py::one</read_file>"
FIX = "<edit_file><L2>    return 1</edit_file><run_terminal>pytest</run_terminal>"


async def run_attempt(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    model: AnsweringModel,
) -> Trajectory:
    sandboxes = Sandboxes([repository], concurrent_trajectories=2)
    worker = RolloutWorker(
        converse=partial(run_agent, model, renderer),
        harness=HarnessConfig(context_tokens=4000, max_generated_tokens=3000),
        sandboxes=sandboxes,
        grade=make_grader(GradingConfig()),
        clock=time.monotonic,
    )
    try:
        return await worker.attempt(AttemptRequest("run.g0.t0", "run.g0", problem, 0, 0, 1))
    finally:
        await sandboxes.close()


def answer_by_turn(conversation: str) -> str:
    turns = conversation.count("<|assistant|>")
    return (READ_AND_TEST, FIX, "Fixed.")[turns] if turns < 3 else "Done."


@pytest.mark.asyncio
async def test_attempt_that_fixes_the_line_passes_the_real_tests(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    model = AnsweringModel(renderer, answer_by_turn, weight_version=4)
    trajectory = await run_attempt(renderer, repository, problem, model)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.verdict is not None
    assert trajectory.verdict.passed
    assert trajectory.reward.total > 0.9
    assert "failed" in trajectory.transcript.turns[0].results[0]
    assert trajectory.transcript.turns[1].results[1] == "passed"
    assert "+    return 1" in trajectory.changed_files["pkg/code.py"]
    assert trajectory.transcript.segments[0].oldest_version == 4


@pytest.mark.asyncio
async def test_attempt_that_does_nothing_is_graded_as_a_failure(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    trajectory = await run_attempt(
        renderer, repository, problem, AnsweringModel(renderer, lambda _: "No idea.")
    )
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.verdict is not None
    assert not trajectory.verdict.passed
    assert trajectory.changed_files == {}


@pytest.mark.asyncio
async def test_engine_failure_is_an_outcome_without_a_verdict(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    model = AnsweringModel(renderer, answer_by_turn)
    model.failure = EngineError("replica r0 is gone")
    trajectory = await run_attempt(renderer, repository, problem, model)
    assert trajectory.outcome is Outcome.ENGINE_FAILED
    assert trajectory.verdict is None
    assert "r0 is gone" in trajectory.reason


WRITE = "for n in 1 2 3 4 5 6 7 8; do head -c 24000000 /dev/zero > file$n; done"
CROWD = f"mkdir many && cd many && seq {MAX_CHANGED_FILES + 1} | xargs touch"
FILL = "while :; do n=$((n+1)); head -c 4000000 /dev/zero > fill$n || exit 9; sleep 0.01; done"


@pytest.mark.asyncio
@pytest.mark.parametrize("command", [WRITE, FILL, CROWD], ids=["write", "fill", "crowd"])
async def test_an_agent_that_ruins_its_box_is_graded_as_a_failure(
    renderer: Renderer, repository: PreparedRepository, problem: Problem, command: str
) -> None:
    ruin = f"<run_terminal>{command}</run_terminal>"
    answers = (ruin, "Fixed.")

    def answer(conversation: str) -> str:
        return answers[min(conversation.count("<|assistant|>"), 1)]

    trajectory = await run_attempt(renderer, repository, problem, AnsweringModel(renderer, answer))
    assert trajectory.outcome is Outcome.BROKEN, trajectory.reason
    assert trajectory.verdict is not None
    assert not trajectory.verdict.passed
    assert trajectory.changed_files == {}
    assert trajectory.transcript.segments[0].sampled_tokens > 0


PLACE = CodePlace(path="pkg/code.py", first_line=2, last_line=2)
REPLIES = {
    "nothing wrong": ((), READ_AND_TEST, "Nothing is wrong.", True),
    "a claimed fix": ((), READ_AND_TEST, "Fixed.", False),
    "an edit": ((), "<edit_file><L2>    return 3</edit_file>", "Nothing is wrong.", False),
    "the line": ((PLACE,), READ_AND_TEST, "It is pkg/code.py:2.", True),
    "another line": ((PLACE,), READ_AND_TEST, "It is pkg/code.py:5.", False),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", REPLIES)
async def test_a_final_message_is_judged_where_no_file_may_change(
    renderer: Renderer, repository: PreparedRepository, problem: Problem, name: str
) -> None:
    places, calls, message, passes = REPLIES[name]
    asked = problem.model_copy(
        update={
            "edits": (),
            "fail_to_pass": (),
            "pass_to_pass": problem.fail_to_pass,
            "reply": WantedReply(places=places),
        }
    )
    answers = ("<read_file>pkg/code.py::one</read_file>", calls, message)

    def answer(conversation: str) -> str:
        return answers[min(conversation.count("<|assistant|>"), 2)]

    trajectory = await run_attempt(renderer, repository, asked, AnsweringModel(renderer, answer))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.verdict is not None
    assert trajectory.verdict.passed is passes, trajectory.verdict.detail
    assert bool(trajectory.changed_files) is (name == "an edit")
    assert trajectory.reward.terms["no_edit"] == 0
    assert (trajectory.reward.total > 0.9) is passes
