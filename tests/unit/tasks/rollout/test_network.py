"""An attempt with a network: its requests are in its record, and no box that judges it has the network."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.sandbox.egress.config import EgressConfig, SandboxConfig
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.rendering import Renderer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.problems.published import write_problems
from ostinato.tasks.records import Problem, Trajectory
from ostinato.tasks.rollout.config import WorkerSetup
from ostinato.tasks.rollout.graded_worker import build_worker
from ostinato.tasks.rollout.payload import trajectory_from_bytes, trajectory_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.local_index import NAME, LocalIndex, served_index
from tests.fakes.one_line_problem import write_package

ASK = f"curl -s $PIP_INDEX_URL/{NAME}/ $PIP_INDEX_URL/pkg/"
# right in a box with a network, wrong in one without
FIX = "    return 1 if __import__('os').path.exists('/egress.sock') else 2"
TRY = "python3 -c 'import pkg.code; print(pkg.code.one())'"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    with served_index(monkeypatch) as index:
        yield index


SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"


def answer_by_turn(conversation: str) -> str:
    turns = (
        f"<run_terminal>{ASK}</run_terminal>",
        "<read_file>pkg/code.py::one</read_file>",
        f"<edit_file><L2>{FIX}</edit_file>",
        f"<run_terminal>{TRY}</run_terminal><run_terminal>pytest</run_terminal>",
    )
    done = conversation.count("<|assistant|>")
    return turns[done] if done < len(turns) else "Done."


@pytest.mark.asyncio
async def test_boxes_that_judge_have_no_network_and_requests_are_recorded(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    index: LocalIndex,
    tmp_path: Path,
) -> None:
    write_problems(tmp_path / "set", [problem])
    kept = tmp_path / "set" / "repositories" / repository.name
    write_package(kept / "files", SOURCE, TESTS).save()
    setup = WorkerSetup(
        tokenizer_directory="",
        problems_directory=str(tmp_path / "set"),
        harness=HarnessConfig(context_tokens=6000, max_generated_tokens=3000),
        grading=GradingConfig(),
        concurrent_trajectories=2,
        sandboxes=SandboxConfig(egress=EgressConfig(allow=("index",))),
    )
    model = AnsweringModel(renderer, answer_by_turn)
    worker = build_worker(setup, partial(run_agent, model, renderer))
    try:
        ended = await worker.attempt(AttemptRequest("run.g0.t0", "run.g0", problem, 0, 0, 1))
    finally:
        await worker.close()
    *_, (tried, tested) = (turn.results for turn in ended.transcript.turns if len(turn.results) > 1)
    assert tried.startswith("1")
    assert "failed" in tested
    assert ended.verdict is not None
    assert not ended.verdict.passed
    assert [(each.path, each.allowed, each.reason) for each in ended.network] == [
        (f"/simple/{NAME}/", True, ""),
        ("/simple/pkg/", False, "the problem was made from package pkg"),
    ]
    assert index.paths == [f"/simple/{NAME}/"]
    again: Trajectory = trajectory_from_bytes(trajectory_to_bytes(ended))
    assert again.network == ended.network
