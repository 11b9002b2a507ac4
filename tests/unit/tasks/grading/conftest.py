"""A problem in the fake repository, its test server, and ways to make transcripts."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from ostinato.infra.agent.transcript import CallStatus, Transcript, TurnRecord
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.records import LineEdit, Problem, Split
from tests.fakes.repositories import WORDKIT, open_repository, running_server
from tests.fakes.transcripts import make_call, transcript_of

PATH = "wordkit/counting.py"


@pytest.fixture(scope="session")
def repository() -> PreparedRepository:
    return open_repository(WORDKIT)


@pytest.fixture(scope="session")
def problem(repository: PreparedRepository) -> Problem:
    lines = repository.files[PATH].decode().split("\n")
    line_number = lines.index("            total += 1") + 1
    return Problem(
        problem_id="wordkit-count_words",
        repository=repository.name,
        repository_fingerprint=repository.fingerprint,
        kind="mutation",
        operator="integer",
        path=PATH,
        symbol="count_words",
        first_line=lines.index("def count_words(text, minimum=1):") + 1,
        last_line=line_number + 1,
        prompt=f"Fix count_words in {PATH}",
        edits=(
            LineEdit(
                path=PATH,
                line_number=line_number,
                gold_text="            total += 1",
                broken_text="            total += 2",
            ),
        ),
        fail_to_pass=(
            "tests/test_counting.py::test_count_words",
            "tests/test_counting.py::test_count_words_minimum",
        ),
        pass_to_pass=("tests/test_counting.py::test_longest_word",),
        split=Split.TRAIN,
    )


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
