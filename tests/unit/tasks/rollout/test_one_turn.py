"""nano's problems of one turn: the first turn is given, and answers sampled elsewhere are judged as ours are."""

import time
from dataclasses import replace
from functools import partial

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Outcome, Problem
from ostinato.tasks.reinforcement.learning.batches.advantages import trained_segments
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.benchmarks.one_turn import GivenAnswers, judge_given, unsampled

LOOK = "<run_terminal>pytest</run_terminal><read_file>pkg/code.py::one</read_file>"
FIX = "<edit_file><L2>    return 1</edit_file><run_terminal>pytest</run_terminal>"


@pytest.mark.asyncio
async def test_after_a_given_first_turn_the_answer_alone_counts_and_is_trained(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    look, fix, done = (renderer.encode_answer(text) for text in (LOOK, FIX, "Done."))
    sandboxes = Sandboxes([repository], concurrent_trajectories=2)
    answers = GivenAnswers(renderer)
    worker = RolloutWorker(
        converse=partial(run_agent, answers, renderer),
        harness=HarnessConfig(max_turns=2, max_generated_tokens=len(look) + len(done)),
        sandboxes=sandboxes,
        grade=make_grader(GradingConfig()),
        clock=time.monotonic,
    )
    request = AttemptRequest("first", "g0", problem, 0, 0, 0)
    try:
        trunk = await judge_given(worker, answers, replace(request, is_trunk=True), [look, done])
        given = trunk.model_copy(update={"transcript": unsampled(trunk.transcript)})
        attempts = [
            await judge_given(
                worker, answers, replace(request, trajectory_id=name, trunk=given), [ids]
            )
            for name, ids in (("a", fix), ("b", fix), ("c", done), ("d", fix[:-1]))
        ]
    finally:
        await sandboxes.close()
    mended, again, idle, cut = attempts
    prompt = given.transcript.segments[0].token_ids_T.tolist()
    assert prompt == trunk.transcript.opening(1).segment.token_ids_T.tolist()
    (segment,) = trained_segments(mended)
    assert segment.token_ids_T.tolist() == prompt + fix
    assert segment.loss_mask_T.tolist() == [False] * len(prompt) + [True] * len(fix)
    assert mended.verdict is not None
    assert mended.verdict.passed
    assert mended.reward == again.reward
    assert idle.outcome is Outcome.FINISHED
    assert cut.reason.startswith("token_limit")  # no call of an answer that does not end is run
    assert idle.reward.terms["no_edit"] == cut.reward.terms["no_edit"] < 0
