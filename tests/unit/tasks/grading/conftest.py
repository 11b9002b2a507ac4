"""A problem in the fake repository, its test server, and ways to make transcripts."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from ostinato.infra.agent.transcript import CallStatus, Transcript, TurnRecord
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.records import Problem
from tests.fakes.one_line_problem import break_line
from tests.fakes.repositories import WORDKIT, open_repository, running_server
from tests.fakes.transcripts import make_call, transcript_of

PATH = "wordkit/counting.py"
TESTS = "tests/test_counting.py"


@pytest.fixture(scope="session")
def repository() -> PreparedRepository:
    return open_repository(WORDKIT)


@pytest.fixture(scope="session")
def problem(repository: PreparedRepository) -> Problem:
    failing = ("test_count_words", "test_count_words_minimum")
    broken = break_line(
        repository,
        "            total += 1",
        "            total += 2",
        symbol="count_words",
        failing=tuple(f"{TESTS}::{name}" for name in failing),
        path=PATH,
    )
    return broken.model_copy(update={"pass_to_pass": (f"{TESTS}::test_longest_word",)})


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, repository: PreparedRepository) -> Iterator[TestServer]:
    with running_server(runner, repository) as server:
        yield server


@pytest.fixture
def make_transcript() -> Callable[..., Transcript]:
    def make(*calls: tuple[str, CallStatus], generated_tokens: int = 10) -> Transcript:
        turns = (
            TurnRecord(
                generated_tokens=generated_tokens,
                text=f"<{tool}></{tool}>",
                calls=(make_call(tool, status),),
            )
            for tool, status in calls
        )
        return transcript_of(turns, message="")

    return make
