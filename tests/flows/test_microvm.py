"""`[rollout] sandbox = "microvm"`: attempts in virtual machines, graded as all others are."""

import asyncio
import shutil
from pathlib import Path

import pytest

from ostinato.flows.chat.workplace import open_workplace
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.stage import RunOptions, StageContext
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.models.rendering import Renderer
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, ShardRequest
from ostinato.tasks.evaluation.checkpoint.shard import run_shard
from ostinato.tasks.evaluation.config import EvaluationConfig
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.problems.published import load_repositories
from ostinato.tasks.records import Outcome, Problem, Split, Trajectory
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.graded_worker import build_worker, token_dialogue
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.miniature import make_checkpoint, make_problem_set

ANSWERS = (
    "<read_file>pkg/code.py::value_0</read_file>",
    "<edit_file><L2>    return 0</edit_file>"
    "<run_terminal>cat /proc/sys/kernel/hostname; python3 -c 'from pkg.code import *; print(value_0() + 40)'"
    "</run_terminal><run_terminal>pytest</run_terminal>",
    "Fixed.",
)


IN_MACHINES = ('rollout.sandbox="microvm"',)


def test_a_recipe_that_wants_virtual_machines_is_refused_where_none_can_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    with pytest.raises(SandboxError, match="apt-get install qemu-system-x86"):
        StageContext.open("miniature", options=RunOptions(overrides=IN_MACHINES))
    assert not (tmp_path / "home").exists()


@pytest.mark.microvm
@pytest.mark.timeout(600)
def test_attempts_of_rollouts_run_in_virtual_machines(tmp_path: Path) -> None:
    problems = make_problem_set(tmp_path / "problems")
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    (line, *_) = (problems / "problems.jsonl").read_text().splitlines()
    problem = Problem.model_validate_json(line)
    setup = WorkerSetup(
        tokenizer_directory=str(checkpoint),
        problems_directory=str(problems),
        harness=HarnessConfig(call_time_limit_seconds=120.0),
        grading=GradingConfig(),
        concurrent_trajectories=3,
        sandbox=load_recipe("miniature", overrides=IN_MACHINES).rollout.sandbox,
    )
    model = AnsweringModel(
        Renderer.load(checkpoint),
        lambda conversation: ANSWERS[min(conversation.count("<|assistant|>"), 2)],
    )

    async def run() -> list[Trajectory]:
        worker = build_worker(setup, token_dialogue(setup, model))
        tickets = [
            AttemptRequest(f"run.g0.t{index}", "run.g0", problem, index, 0, index)
            for index in range(3)
        ]
        try:
            return await asyncio.gather(*(worker.attempt(ticket) for ticket in tickets))
        finally:
            await worker.close()

    names = set()
    for trajectory in asyncio.run(run()):
        assert trajectory.outcome is Outcome.FINISHED, trajectory.reason
        assert trajectory.verdict is not None
        assert trajectory.verdict.passed
        seen = trajectory.transcript.turns[1].results[1].split()
        assert "40" in seen
        names |= {word for word in seen if word.startswith("microvm-")}
    assert len(names) == 3  # a machine of its own for each attempt


def test_evaluation_gateway_and_chat_honour_the_kind_of_sandbox(monkeypatch, tmp_path):
    """Without QEMU each says so, before any work."""
    problems = make_problem_set(tmp_path / "problems", Split.HELD_OUT)
    repositories = list(load_repositories(problems).values())
    evaluation = EvaluationRequest(
        checkpoint_directory=str(make_checkpoint(tmp_path / "checkpoint")),
        checkpoint_name="random",
        problems_directory=str(problems),
        config=EvaluationConfig(problems=1, attempts_per_problem=1),
        sandbox=SandboxKind.MICROVM,
    )
    shard = ShardRequest(evaluation=evaluation, index=0, count=1)
    (tmp_path / "git").symlink_to(shutil.which("git") or "git")
    monkeypatch.setenv("PATH", str(tmp_path))

    async def chat() -> None:
        folder = repositories[0].directory
        async with open_workplace(
            folder,
            tmp_path / "copy",
            warm_tests=False,
            test_limit_seconds=1.0,
            sandbox=SandboxKind.MICROVM,
        ):
            pass

    async def serve() -> None:
        RepositoryWorkplaces(
            repositories,
            boxes_per_repository=1,
            test_limit_seconds=1.0,
            sandbox=SandboxKind.MICROVM,
        )

    with pytest.raises(SandboxError, match="qemu"):
        run_shard(shard, Workspace.open(tmp_path, load_settings()))
    for use in (chat, serve):
        with pytest.raises(SandboxError, match="qemu"):
            asyncio.run(use())
