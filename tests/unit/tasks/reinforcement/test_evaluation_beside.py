"""Evaluation beside training: one weight version per point, whatever the replica serves meanwhile."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import EngineError
from ostinato.tasks.records import Outcome, Trajectory
from ostinato.tasks.reinforcement.evaluation import OnlineEvaluation, read_points
from ostinato.tasks.reinforcement.records import OnlineEvaluationConfig
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

CONFIG = OnlineEvaluationConfig(every_steps=2, problems=4, attempts_per_problem=2)
PROBLEMS = [make_problem(f"p{index}") for index in range(4)]


class Replica:
    """Serves the version pinned on it; version 0 solves first attempts, later ones all."""

    def __init__(self) -> None:
        self.version = -1
        self.pinned: list[int] = []
        self.begun: list[tuple[int, str, int]] = []
        self.intruder: int | None = None  # served to the next attempt in place of the pinned one
        self.is_dying = False
        self.free = asyncio.Event()
        self.free.set()

    async def pin(self, version: int) -> None:
        if version < 0:
            raise EngineError(f"version {version} is not on the chain")
        self.version = version
        self.pinned.append(version)

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        await self.free.wait()
        self.begun.append((self.version, request.problem.problem_id, request.attempt))
        if self.is_dying:
            self.is_dying, self.version = False, -1
            return make_trajectory(request, outcome=Outcome.ENGINE_FAILED, versions=())
        versions = (self.version, self.version)
        if self.intruder is not None:
            versions, self.intruder = (self.version, self.intruder), None
        is_solved = request.attempt == 0 or set(versions) != {0}
        return make_trajectory(request, versions=versions, solved=is_solved)


def beside(replica: Replica, directory: Path) -> OnlineEvaluation:
    return OnlineEvaluation(
        CONFIG,
        PROBLEMS,
        attempt=replica.attempt,
        pin=replica.pin,
        directory=directory,
        concurrent_attempts=3,
    )


async def test_each_point_is_of_the_version_that_was_due(tmp_path: Path) -> None:
    replica = Replica()
    evaluation = beside(replica, tmp_path)
    for step in range(4):
        evaluation.offer(step, version=10 * step)
        await evaluation.finish()
    first, second = evaluation.points
    assert (first.step, first.weight_version, second.step, second.weight_version) == (0, 0, 2, 20)
    assert first.average is not None
    assert first.average.mean == 0.5
    assert first.average.low < 0.5 < first.average.high
    assert first.best_of is not None
    assert first.best_of.mean == 1.0
    assert second.average is not None
    assert second.average.mean == 1.0
    told = evaluation.newest_metrics()
    assert told["evaluation_step"] == 2
    assert told["evaluation_seconds"] == second.seconds > 0
    for name in ("evaluation_average", "evaluation_best_of"):
        assert told[f"{name}_low"] < told[name] <= told[f"{name}_high"]


@pytest.mark.parametrize("fault", ["mixed", "restarted"])
async def test_an_attempt_with_another_versions_token_is_made_again(
    tmp_path: Path, fault: str
) -> None:
    replica = Replica()
    evaluation = beside(replica, tmp_path)
    if fault == "mixed":
        replica.intruder = 7
    else:
        replica.is_dying = True
    evaluation.offer(0, version=0)
    [point] = await evaluation.finish()
    assert point.average is not None
    assert point.average.mean == 0.5
    assert len(replica.begun) == 1 + 2 * len(PROBLEMS)
    assert set(replica.pinned) == {0}
    assert len(replica.pinned) > 1


async def test_a_version_that_keeps_being_mixed_is_not_measured(tmp_path: Path) -> None:
    class Mixing(Replica):
        async def attempt(self, request: AttemptRequest) -> Trajectory:
            self.intruder = self.version + 1
            return await super().attempt(request)

    evaluation = beside(Mixing(), tmp_path)
    evaluation.offer(0, version=3)
    [point] = await evaluation.finish()
    assert point.average is None
    assert "versions [4], wanted 3" in point.reason
    assert evaluation.newest_metrics() == {}


async def test_what_is_due_meanwhile_is_noted_as_not_measured_and_the_last_is_made_at_the_end(
    tmp_path: Path,
) -> None:
    replica = Replica()
    replica.free.clear()
    evaluation = beside(replica, tmp_path)
    evaluation.offer(0, version=0)
    evaluation.offer(2, version=2)
    evaluation.offer(4, version=4)
    assert [point.average for point in evaluation.points] == [None, None]
    replica.free.set()
    first, skipped, last = await evaluation.finish()
    assert (first.step, first.average is None) == (0, False)
    assert (skipped.step, skipped.average is None) == (2, True)
    assert (last.step, last.weight_version, last.average is None) == (4, 4, False)
    assert skipped.reason == "step 0 was still evaluated"
    assert replica.pinned == [0, 4]
    assert await evaluation.finish() == (first, skipped, last)
    assert replica.pinned == [0, 4]


async def test_a_version_that_is_not_there_is_noted_with_the_reason(tmp_path: Path) -> None:
    evaluation = beside(Replica(), tmp_path)
    evaluation.offer(4, version=-1)
    assert "not on the chain" in (await evaluation.finish())[-1].reason


async def test_a_point_under_way_at_a_kill_is_measured_by_a_run_that_goes_on_from_a_later_step(
    tmp_path: Path,
) -> None:
    before, after = Replica(), Replica()
    killed = beside(before, tmp_path)
    before.free.clear()
    killed.offer(2, version=2)
    killed.offer(3, version=3)
    await asyncio.sleep(0)
    assert killed.points == ()  # not known yet: nothing to draw
    await killed.close()

    resumed = beside(after, tmp_path)
    resumed.resume(3)
    resumed.offer(3, version=3)
    [point] = await resumed.finish()
    assert (point.step, point.weight_version) == (2, 2)
    assert point.average is not None
    assert set(after.pinned) == {2}
    again = beside(after, tmp_path)
    again.resume(3)
    assert await again.finish() == (point,)
    assert len(after.begun) == 2 * len(PROBLEMS)  # known: not evaluated again


async def test_a_point_of_a_step_that_is_taken_again_waits_for_its_weights(tmp_path: Path) -> None:
    before, after = Replica(), Replica()
    killed = beside(before, tmp_path)
    before.free.clear()
    killed.offer(4, version=4)
    await killed.close()
    resumed = beside(after, tmp_path)
    resumed.resume(3)  # its checkpoint was damaged and deleted
    assert await resumed.finish() == ()
    resumed.offer(4, version=5)
    [point] = await resumed.finish()
    assert (point.step, point.weight_version) == (4, 5)
    assert set(after.pinned) == {5}


async def test_a_run_that_was_killed_makes_only_the_missing_attempts(tmp_path: Path) -> None:
    before, after = Replica(), Replica()
    killed = beside(before, tmp_path)
    before.free.clear()
    killed.offer(0, version=0)
    for _ in range(3):
        await asyncio.sleep(0)
    before.free.set()
    while len(before.begun) < 4:
        await asyncio.sleep(0)
    await killed.close()

    resumed = beside(after, tmp_path)
    resumed.offer(0, version=0)
    [point] = await resumed.finish()
    assert point.average is not None
    assert point.average.mean == 0.5
    assert len(after.begun) < 2 * len(PROBLEMS)
    assert read_points(tmp_path) == [point]
    resumed.offer(0, version=0)
    await resumed.finish()
    assert len(after.pinned) == 1  # known: not evaluated again
