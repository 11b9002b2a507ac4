"""The full dialect's tools in a real box: files, search, terminal, jobs, lints."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.full.calls import parse_calls, write_call
from ostinato.infra.agent.dialects.full.terminal import JOBS_DIRECTORY
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.execute import CallResult, execute_calls
from ostinato.infra.agent.search.index import LocalSearch, SearchService
from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.repository import PreparedRepository

CONFIG = HarnessConfig(dialect="full", result_limit_characters=8000, call_time_limit_seconds=120)
SOURCE = "import os\n\n\ndef double(value):\n    return value * 2\n"
# the first has said its word, the second has ended
BOTH_ARE_SO_FAR = f"[ -e /tmp/up ] && [ -s {JOBS_DIRECTORY}/2.exit ]"
TEST = "from pkg.core import double\n\n\ndef test_double():\n    assert double(2) == 4\n"


def call(name: str, **arguments: str) -> str:
    return write_call(name, arguments)


TURNS: list[str] = [
    call("glob", pattern="*.py")
    + call("list_dir", depth="2")
    + call("read_file", path="pkg/core.py"),
    call("grep", pattern="def (double|half)")
    + call("grep", pattern="DOUBLE", ignore_case="true", mode="count")
    + call("grep", pattern="zebra")
    + call("grep", pattern="(", path="pkg")
    + call("grep", pattern="double", glob="test_*", mode="files"),
    call("edit_file", path="pkg/core.py", old="return value * 2", new="return valu * 2")
    + call("read_lints"),
    call("run_terminal", command="pytest -q tests"),
    call("edit_file", path="pkg/core.py", old="return valu * 2", new="return value + value")
    + call("run_terminal", command="python -m pytest -q tests")
    + call("codebase_search", query="double a value", directories="pkg"),
    call("write_file", path="notes/a.md", text="hello\n")
    + call("delete_file", path="tests/test_core.py"),
    call("run_terminal", command="echo started; touch /tmp/up; sleep 600", background="true")
    + call("run_terminal", command="exit 3", background="true")
    + call("run_terminal", command=f"until {BOTH_ARE_SO_FAR}; do sleep 0.01; done")
    + call("run_terminal", job="job-1")
    + call("run_terminal", job="job-2")
    + call("run_terminal", job="job-1", stop="true")
    + call("run_terminal", job="job-9"),
    call("run_terminal", command="echo before; sleep 600", timeout_seconds="3"),
    call("read_file", path="/etc/passwd") + call("read_file", path="link"),
]


async def take_turns(directory: Path) -> tuple[list[list[CallResult]], dict[str, bytes | None]]:
    repository = PreparedRepository.from_directory("pkg", directory, ("pkg",), ("tests",))
    place = RepositoryEnvironment.create(repository, boxes=1)
    sandbox = await place.lease()
    try:
        await sandbox.exec("ln -s /etc/passwd link", timeout_seconds=10)
        search = LocalSearch(SearchService(None), "pkg", repository.files)
        environment = AgentEnvironment(sandbox, code_search=search, baseline=dict(repository.files))
        results = [
            await execute_calls(parse_calls(text, FULL_TOOLS).calls, environment, CONFIG)
            for text in TURNS
        ]
        return results, await sandbox.diff()
    finally:
        await place.release(sandbox)
        await place.close()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("repository")
    for path, text in {
        "pkg/__init__.py": "",
        "pkg/core.py": SOURCE,
        "tests/test_core.py": TEST,
    }.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(text)
    return asyncio.run(take_turns(directory))


def bodies(results: list[CallResult]) -> list[str]:
    return [result.text.partition("\n")[2] for result in results]


def test_looking_around(outcome) -> None:
    found, listed, shown = bodies(outcome[0][0])
    assert found == "pkg/__init__.py\npkg/core.py\ntests/test_core.py"
    assert listed.split("\n")[-5:] == [
        *("pkg/", "  __init__.py", "  core.py", "tests/", "  test_core.py"),
    ]
    assert shown.split("\n")[3] == "4\tdef double(value):"


def test_searching(outcome) -> None:
    lines, counts, nothing, broken, names = outcome[0][1]
    assert bodies([lines, nothing, names]) == [
        *("pkg/core.py:4:def double(value):", "no matches", "tests/test_core.py"),
    ]
    assert bodies([counts])[0] == "pkg/core.py:1\ntests/test_core.py:3"
    assert broken.record.status is CallStatus.ENVIRONMENT


def test_an_edit_answers_with_its_diff_and_only_the_lints_it_brought(outcome) -> None:
    edited, lints = bodies(outcome[0][2])
    assert "-    return value * 2\n+    return valu * 2" in edited
    assert edited.endswith("new lint pkg/core.py:5: F821 Undefined name `valu`")
    assert lints == "new lint pkg/core.py:5: F821 Undefined name `valu`"


def test_tests_run_as_a_command(outcome) -> None:
    (failed,), (_, passed, found) = bodies(outcome[0][3]), bodies(outcome[0][4])
    assert failed.startswith("exit code 1")
    assert "name 'valu' is not defined" in failed
    assert passed.startswith("exit code 0")
    assert "1 passed" in passed
    assert found.startswith("pkg/core.py:4-6 def double")


def test_files_come_and_go(outcome) -> None:
    assert bodies(outcome[0][5]) == ["created, 1 lines", "deleted"]
    changed = outcome[1]
    assert changed["notes/a.md"] == b"hello\n"
    assert changed["tests/test_core.py"] is None
    assert b"value + value" in changed["pkg/core.py"]


def test_background_jobs_are_started_asked_and_stopped(outcome) -> None:
    first, second, _, running, ended, stopped, missing = bodies(outcome[0][6])
    assert (first, second) == ("started job-1", "started job-2")
    assert running == "still running\nstarted"
    assert ended == "ended with exit code 3"
    assert stopped == "ended by a signal\nstarted"
    assert "no job 'job-9'" in missing


def test_a_command_over_its_time_is_ended_and_shows_what_it_printed(outcome) -> None:
    (result,) = outcome[0][7]
    assert result.record.status is CallStatus.TIMEOUT
    assert "longer than 3 seconds" in result.text
    assert result.text.endswith("before")


def test_nothing_outside_the_repository_is_read(outcome) -> None:
    absolute, link = outcome[0][8]
    assert absolute.record.status is CallStatus.INVALID_ARGUMENTS
    assert "root:" not in absolute.text + link.text
