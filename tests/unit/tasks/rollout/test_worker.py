"""One trajectory in a real box with real tests; only the model is scripted."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.errors import EngineError, ProblemError
from infra.harness.config import HarnessConfig
from infra.harness.transcript import Transcript
from infra.sandbox.repository import PreparedRepository
from infra.sandbox.test_server import TestServer
from models.rendering import Renderer, train_tokenizer
from tasks.records import LineEdit, Outcome, Problem, RewardReport, Trajectory, Verdict
from tasks.rollout.sandboxes import Sandboxes
from tasks.rollout.worker import (
    AttemptTicket,
    RolloutWorker,
    break_repository,
    describe_change,
)
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.rollouts import make_problem

SOURCE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = "from pkg.code import one\n\n\ndef test_one():\n    assert one() == 1\n"
READ_AND_TEST = (
    "<run_terminal>pytest</run_terminal><read_file>pkg/code.py::one</read_file>"
)
FIX = "<edit_file><L2>    return 1</edit_file><run_terminal>pytest</run_terminal>"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([SOURCE, TESTS], vocab_size=400))


@pytest.fixture
def repository(tmp_path: Path) -> PreparedRepository:
    for path, text in (
        ("pkg/__init__.py", ""),
        ("pkg/code.py", SOURCE),
        ("tests/test_code.py", TESTS),
    ):
        (tmp_path / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / path).write_text(text)
    return PreparedRepository.from_directory(
        "pkg", tmp_path / "files", ("pkg",), ("tests",)
    )


@pytest.fixture
def problem(repository: PreparedRepository) -> Problem:
    return make_problem("p0").model_copy(
        update={"repository_fingerprint": repository.fingerprint}
    )


async def grade(
    problem: Problem,
    changes: Mapping[str, bytes | None],
    transcript: Transcript,
    tests: TestServer,
) -> tuple[Verdict, RewardReport]:
    report = await tests.run(changes, problem.fail_to_pass)
    outcomes = {test: outcome.value for test, outcome in report.outcomes.items()}
    verdict = Verdict(
        problem_id=problem.problem_id,
        passed=report.passed,
        tests_required=len(outcomes),
        tests_passed=len(report.passed_ids),
        outcomes=outcomes,
    )
    return verdict, RewardReport(
        total=float(report.passed), terms={"solved": float(report.passed)}
    )


async def run_attempt(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    model: AnsweringModel,
) -> Trajectory:
    sandboxes = Sandboxes([repository], concurrent_trajectories=2)
    worker = RolloutWorker(
        model=model,
        renderer=renderer,
        harness=HarnessConfig(),
        sandboxes=sandboxes,
        grade=grade,
        clock=time.monotonic,
    )
    try:
        return await worker.attempt(
            AttemptTicket("run.g0.t0", "run.g0", problem, 0, 1, temperature=1.0)
        )
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
    assert trajectory.verdict is not None and trajectory.verdict.passed
    assert trajectory.reward.total == 1.0
    assert "failed" in trajectory.transcript.turns[0].results[0]
    assert trajectory.transcript.turns[1].results[1] == "passed"
    assert "+     return 1" in trajectory.changed_files["pkg/code.py"]
    assert trajectory.transcript.segments[0].oldest_version == 4


@pytest.mark.asyncio
async def test_attempt_that_does_nothing_is_graded_as_a_failure(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    trajectory = await run_attempt(
        renderer, repository, problem, AnsweringModel(renderer, lambda _: "No idea.")
    )
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.verdict is not None and not trajectory.verdict.passed
    assert trajectory.changed_files == {}


@pytest.mark.asyncio
async def test_engine_failure_is_an_outcome_without_a_verdict(
    renderer: Renderer, repository: PreparedRepository, problem: Problem
) -> None:
    model = AnsweringModel(renderer, answer_by_turn)
    model.failure = EngineError("replica r0 is gone")
    trajectory = await run_attempt(renderer, repository, problem, model)
    assert trajectory.outcome is Outcome.ENGINE_FAILED
    assert trajectory.verdict is None and "r0 is gone" in trajectory.reason


def test_broken_repository_differs_in_the_named_line_only(
    repository: PreparedRepository, problem: Problem
) -> None:
    broken = break_repository(repository, problem)["pkg/code.py"].decode()
    assert broken == SOURCE.replace("return 1", "return 2")


def test_problem_of_another_text_is_refused(
    repository: PreparedRepository, problem: Problem
) -> None:
    edit = LineEdit(
        path="pkg/code.py", line_number=1, gold_text="def uno():", broken_text="pass"
    )
    with pytest.raises(
        ProblemError,
        match=r"p0: line 1 of pkg/code.py is 'def one\(\):', wanted 'def uno\(\):'",
    ):
        break_repository(repository, problem.model_copy(update={"edits": (edit,)}))


def test_change_is_described_by_its_lines_alone() -> None:
    text = describe_change(b"a\nb\nc\n", b"a\nX\nc\n")
    assert text == "@@ -2,1 +2,1 @@\n- b\n+ X"
