"""One problem with a hidden test, its boxes, and a way to let a script attempt it."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.records import BlockEdit, Problem, Split, Trajectory
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.repositories import WORDKIT, open_repository

PATH = "wordkit/counting.py"
TESTS = "tests/test_counting.py"
HIDDEN = f"{TESTS}::test_most_common_limit"
STUB = "    raise NotImplementedError"
Attempt = Callable[..., Trajectory]


@pytest.fixture(scope="session")
def repository() -> PreparedRepository:
    return open_repository(WORDKIT)


@pytest.fixture(scope="session")
def problem(repository: PreparedRepository) -> Problem:
    """Two functions lost their bodies; one of the three failing tests is hidden."""
    source = repository.files[PATH].decode().split("\n")
    tests = repository.files[TESTS].decode().split("\n")
    hidden_first = tests.index("def test_most_common_limit():") + 1
    return Problem(
        problem_id="wordkit-two-bodies",
        repository=repository.name,
        repository_fingerprint=repository.fingerprint,
        kind="feature_deletion",
        operator="body",
        path=PATH,
        symbol="most_common",
        first_line=source.index("def most_common(words, limit=3):") + 1,
        last_line=len(source) - 1,
        prompt=f"longest_word and most_common in {PATH} do nothing.",
        edits=(),
        blocks=(_cut(source, "def longest_word"), _cut(source, "def most_common")),
        cut_tests=(
            BlockEdit(
                path=TESTS,
                first_line=hidden_first,
                gold_lines=tuple(tests[hidden_first - 1 : hidden_first + 2]),
                broken_lines=(),
            ),
        ),
        hidden_tests=(HIDDEN,),
        fail_to_pass=(f"{TESTS}::test_longest_word", f"{TESTS}::test_most_common", HIDDEN),
        pass_to_pass=(f"{TESTS}::test_count_words", f"{TESTS}::test_count_words_minimum"),
        split=Split.TRAIN,
    )


def _cut(lines: list[str], start: str) -> BlockEdit:
    """The body below the docstring of a function becomes a stub."""
    head = next(index for index, line in enumerate(lines) if line.startswith(start))
    first = head + 2
    last = first
    while last < len(lines) and (lines[last].strip() and lines[last].startswith(" ")):
        last += 1
    return BlockEdit(
        path=PATH,
        first_line=first + 1,
        gold_lines=tuple(lines[first:last]),
        broken_lines=(STUB,),
    )


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, repository: PreparedRepository) -> Iterator[TestServer]:
    server = TestServer(repository, SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0))
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture(scope="module")
def attempt(
    runner: asyncio.Runner, repository: PreparedRepository, problem: Problem
) -> Iterator[Attempt]:
    """Run a script of answers through harness, box and grader."""
    sandboxes = Sandboxes([repository], concurrent_trajectories=1)
    renderer = Renderer(train_tokenizer([repository.files[PATH].decode()], vocab_size=400))

    def run(
        answers: Sequence[str],
        config: GradingConfig | None = None,
        *,
        call_seconds: float = 30.0,
        **change,
    ) -> Trajectory:
        harness = HarnessConfig(
            context_tokens=60_000,
            max_generated_tokens=30_000,
            call_time_limit_seconds=call_seconds,
        )
        script = [*answers, "Fixed."]

        def answer(conversation: str) -> str:
            turn = conversation.count("<|assistant|>")
            return script[turn] if turn < len(script) else "Done."

        worker = RolloutWorker(
            converse=partial(run_agent, AnsweringModel(renderer, answer), renderer),
            harness=harness,
            sandboxes=sandboxes,
            grade=make_grader(config or GradingConfig(time_limit_seconds=8.0)),
            clock=time.monotonic,
        )
        what = problem.model_copy(update=change)
        return runner.run(worker.attempt(AttemptRequest("r.g.t", "r.g", what, 0, 0, 1)))

    yield run
    runner.run(sandboxes.close())
