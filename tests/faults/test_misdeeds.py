"""Attempts that do their worst: the run ends as planned, each attempt has one outcome, and nothing is left."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import Trajectory
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig, StalenessConfig
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.orchestrator import Limits, Orchestrator
from ostinato.tasks.rollout.payload import trajectory_from_bytes, trajectory_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.slots import INFRASTRUCTURE_OUTCOMES
from ostinato.tasks.rollout.steps import RunProgress, StepRequest
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.one_line_problem import write_package
from tests.fakes.rollouts import MemoryJournal, make_problem
from tests.faults.misdeeds import MISDEEDS

SOURCE = "def one():\n    return 1\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"
GROUP = 2


def children() -> set[str]:
    """Processes that this one began, and theirs."""
    found, parents = set(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[entry.name] = fields[1]
    for name in parents:
        above = name
        while above in parents and above != str(os.getpid()):
            above = parents[above]
        if above == str(os.getpid()) and name != above:
            found.add(name)
    return found


def groups_of_control() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob(f"**/ostinato/{os.getpid()}-*"))


async def soak(folder: Path, groups: int) -> tuple[Orchestrator, list[Trajectory], Path]:
    """A run in which each group of attempts does one thing of the list."""
    repository = write_package(folder, SOURCE, TESTS)
    renderer = Renderer(train_tokenizer([SOURCE, TESTS, *MISDEEDS.values()], vocab_size=500))
    names = list(MISDEEDS)
    problems = [
        make_problem(f"p{index:03d}").model_copy(
            update={
                "repository_fingerprint": repository.fingerprint,
                "prompt": f"Fix one in pkg/code.py, way {index % len(names)}.",
            }
        )
        for index in range(groups)
    ]

    def answer(conversation: str) -> str:
        if conversation.count("<|assistant|>") > 0:
            return "Fixed."
        way = int(conversation.rpartition(", way ")[2].partition(".")[0])
        return f"<run_terminal>{MISDEEDS[names[way]]}</run_terminal>"

    sandboxes = Sandboxes([repository], concurrent_trajectories=4)
    worker = RolloutWorker(
        converse=partial(run_agent, AnsweringModel(renderer, answer), renderer),
        harness=HarnessConfig(
            context_tokens=6000, max_generated_tokens=4000, call_time_limit_seconds=3.0
        ),
        sandboxes=sandboxes,
        grade=make_grader(GradingConfig()),
        clock=time.monotonic,
    )
    ended: list[Trajectory] = []

    async def attempt(request: AttemptRequest) -> Trajectory:
        trajectory = await worker.attempt(request)
        ended.append(trajectory_from_bytes(trajectory_to_bytes(trajectory)))  # as between actors
        return trajectory

    async def train(request: StepRequest) -> int:
        return request.trainer_version + 1

    config = RolloutConfig(
        group_size=GROUP,
        groups_per_step=1,
        concurrent_trajectories=4,
        least_spread=0.0,
        staleness=StalenessConfig(max_staleness_versions=100_000, admission="cap"),
    )
    curriculum = Curriculum(problems, CurriculumConfig(), group_size=GROUP, seed=0)
    orchestrator = Orchestrator(
        "soak",
        config,
        curriculum=curriculum,
        journal=MemoryJournal(),
        attempt=attempt,
        train=train,
        limits=Limits(max_steps=groups),
        progress=RunProgress(),
    )
    try:
        await orchestrator.run()
    finally:
        await worker.close()
    assert isinstance(sandboxes._backend, NamespaceBackend)
    return orchestrator, ended, sandboxes._backend.store.directory


@pytest.mark.parametrize(
    "attempts", [62, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])]
)
def test_a_run_of_attempts_that_do_their_worst_ends_as_planned(
    tmp_path: Path, attempts: int
) -> None:
    groups = groups_of_control()
    processes, folders = children(), set(Path("/dev/shm").glob(f"ostinato-*-{os.getpid()}-*"))
    orchestrator, ended, directory = asyncio.run(soak(tmp_path, attempts // GROUP))
    assert orchestrator.progress.steps_done == attempts // GROUP, {one.reason for one in ended}
    ids = Counter(one.trajectory_id for one in ended)
    assert set(ids.values()) == {1}
    assert all(one.reason for one in ended)
    assert orchestrator.attempts.dispatched == len(ended)
    assert len(ended) >= attempts
    for one in ended:
        (call,) = one.transcript.turns[0].calls
        assert call.status is not CallStatus.MALFORMED, call
    lost = [one.reason for one in ended if one.outcome in INFRASTRUCTURE_OUTCOMES]
    assert len(lost) <= len(ended) // 10, lost
    assert not any(one.is_fault for one in ended), [one.reason for one in ended if one.is_fault]
    assert not [one for one in ended if one.verdict is not None and one.verdict.passed]
    assert not directory.exists()
    assert set(Path("/dev/shm").glob(f"ostinato-*-{os.getpid()}-*")) <= folders
    assert children() <= processes
    assert str(directory) not in Path("/proc/self/mounts").read_text()
    assert groups_of_control() <= groups
