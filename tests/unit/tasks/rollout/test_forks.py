"""Forked groups: what siblings share, and that each attempt of one is trained once."""

import time
from collections.abc import Sequence
from functools import partial

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Branch, Outcome, Problem, Trajectory
from ostinato.tasks.rollout.forks import ForkedGroups
from ostinato.tasks.rollout.payload import trajectory_from_bytes, trajectory_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.unit.tasks.rollout.test_orchestrator import Script, heavy_tail

# The first turn leaves a file behind and sees the tests fail; the second mends the line or does not.
LOOK = (
    "<run_terminal>echo seen > note.txt; false</run_terminal>"
    "<read_file>pkg/code.py::one</read_file><run_terminal>pytest</run_terminal>"
)
FIX = "<edit_file><L2>    return 1</edit_file><run_terminal>pytest</run_terminal>"


def wants(first: str) -> AttemptRequest:
    return AttemptRequest(f"run.g0.{first}", "run.g0", make_problem("p0"), 0, retry=0, seed=1)


async def run_forked(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    answers: Sequence[Sequence[str]],
) -> list[Trajectory]:
    """The group whose attempts give these answers, one after another."""
    sandboxes = Sandboxes([repository], concurrent_trajectories=2)
    groups = ForkedGroups(1.0)
    requests = [
        AttemptRequest(f"run.g0.t{number}", "run.g0", problem, number, retry=0, seed=number)
        for number in range(len(answers))
    ]
    (trunk,) = groups.begin(0, requests)
    ended = []
    waiting = [trunk]
    try:
        while waiting:
            request = waiting.pop(0)

            def answer(conversation: str, number: int = request.attempt) -> str:
                turn = conversation.count("<|assistant|>")
                return answers[number][turn] if turn < len(answers[number]) else "Done."

            worker = RolloutWorker(
                converse=partial(run_agent, AnsweringModel(renderer, answer), renderer),
                harness=HarnessConfig(context_tokens=4000, max_generated_tokens=3000),
                sandboxes=sandboxes,
                grade=make_grader(GradingConfig()),
                clock=time.monotonic,
            )
            # as it travels between processes
            ended.append(trajectory_from_bytes(trajectory_to_bytes(await worker.attempt(request))))
            waiting += groups.continued(request, ended[-1])
    finally:
        await sandboxes.close()
    return ended


@pytest.mark.asyncio
async def test_siblings_have_the_tokens_the_box_and_the_memory_of_their_trunk(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    trunk, fixed, idle = await run_forked(
        renderer, repository, problem, [[LOOK, "No idea."], ["-", FIX], ["-", "No idea."]]
    )
    assert trunk.branch is not None
    assert trunk.branch.turns == 1
    assert "note.txt" in trunk.branch.files
    opening = trunk.transcript.opening(1)
    length = len(opening.segment.token_ids_T)
    for sibling in (fixed, idle):
        assert sibling.branch == Branch(turns=1)
        segment = sibling.transcript.segments[0]
        assert segment.token_ids_T[:length].tolist() == opening.segment.token_ids_T.tolist()
        assert segment.logprobs_T[:length].tolist() == opening.segment.logprobs_T.tolist()
        assert sibling.transcript.turns[0] == trunk.transcript.turns[0]
        assert sibling.transcript.opening_tokens(1) == length
    # the edit names a line of what only the trunk had read, and the file is the trunk's
    assert fixed.transcript.turns[1].results[1] == "passed"
    assert "note.txt" in fixed.changed_files
    assert [bool(each.verdict and each.verdict.passed) for each in (trunk, fixed, idle)] == [
        False,
        True,
        False,
    ]


@pytest.mark.asyncio
async def test_where_no_test_run_failed_the_others_begin_at_the_start(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    trunk, other = await run_forked(
        renderer, repository, problem, [["No idea."], [LOOK, FIX, "Fixed."]]
    )
    assert trunk.is_context_only
    assert other.branch is None
    assert other.verdict is not None
    assert other.verdict.passed


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_every_group_is_trained_once_and_trunks_come_first(share: float) -> None:
    script = Script(heavy_tail, steps=12)
    script.orchestrator._forks = ForkedGroups(share)
    begun: dict[str, list[AttemptRequest]] = {}
    scripted = script.attempt

    async def attempt(request: AttemptRequest) -> Trajectory:
        begun.setdefault(request.group_id, []).append(request)
        lost = request.seed % 5 == 0 and request.retry == 0
        outcome = Outcome.SANDBOX_FAILED if lost else Outcome.FINISHED
        ended = await scripted(request)
        branch = Branch(turns=0) if request.is_trunk and not lost else None
        return ended.model_copy(update={"outcome": outcome, "branch": branch})

    script.orchestrator.attempts._attempt = attempt
    script.run()
    assert set(script.trained.values()) == {1}
    forked = [requests for requests in begun.values() if requests[0].is_trunk]
    assert abs(len(forked) - share * len(begun)) <= 1
    for group_id in script.trained:
        requests = begun[group_id]
        if requests[0].is_trunk:
            siblings = [request for request in requests if not request.is_trunk]
            assert siblings == requests[-len(siblings) :]
            trunks = {sibling.trunk.trajectory_id for sibling in siblings if sibling.trunk}
            assert len(trunks) == 1
    assert len(script.journal.reserved) == len(set(script.journal.reserved))


def test_a_lost_trunk_leaves_the_others_to_begin_at_the_start() -> None:
    groups = ForkedGroups(1.0)
    requests = [wants("t0"), wants("t1")]
    (trunk,) = groups.begin(0, requests)
    lost = make_trajectory(trunk, outcome=Outcome.ENGINE_FAILED)
    assert groups.continued(trunk, lost) == [requests[1]]


def test_the_share_of_groups_is_exact() -> None:
    groups = ForkedGroups(0.25)
    begun = [groups.begin(number, [wants("a"), wants("b")]) for number in range(100)]
    assert sum(len(started) == 1 for started in begun) == 25
