"""The second runner keeps the outcome of every id, and nothing a test leaves behind holds it."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CALL_ROOT, run_call_program
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.one_line_problem import TESTS, write_package

SOURCE = "def double(number):\n    return 2 * number\n"
HARD_IDS = (
    *("a - b", "a - c", " - ", "a - b - c", "x ", " x", "[", "]", "][", "a]::b", "::", "a::b", "]"),
    *(
        "PASSED x",
        "\nFAILED x",
        "a\nb",
        "\t",
        "'\"`$(x)",
        "*",
        "é",
        "\u2028",
        "\x85",
        "\x0c",
        "%",
        "",
    ),
    *("\\", "\\n", "@x", "-k no", "--help", "a" * 2000, "\ud800".encode("unicode_escape").decode()),
)
# outcome by the remainder of the test's number
BODY = """import pytest
from pkg.code import double

IDS = {ids}


@pytest.fixture
def broken_end(request):
    yield
    if request.param % 5 == 3:
        raise ValueError("at the end")


@pytest.mark.parametrize("broken_end", range(len(IDS)), ids=IDS, indirect=True)
def test_one(broken_end, request):
    number = request.node.callspec.params["broken_end"]
    if number % 5 == 2:
        pytest.skip("not now")
    assert number % 5 != 1
    if number % 5 == 4:
        pytest.xfail("known")
"""
WANTED = (
    TestOutcome.PASSED,
    TestOutcome.FAILED,
    TestOutcome.SKIPPED,
    TestOutcome.ERROR,
    TestOutcome.SKIPPED,
)


def run_both(folder: Path, tests: str, names: list[str] | None = None) -> list[TestReport]:
    """Reports of the warm test server and of the second runner on the original."""
    repository = write_package(folder, SOURCE, tests)

    async def run() -> list[TestReport]:
        server = TestServer(repository)
        try:
            await server.start()
            ids = list(server.tests) if names is None else [f"{TESTS}::{name}" for name in names]
            first = await server.run({}, ids, 60.0)
        finally:
            await server.close()
        return [first, await run_plainly(repository, {}, ids, 10.0)]

    return asyncio.run(run())


def check_ids(folder: Path, ids: list[str]) -> None:
    first, second = run_both(folder, BODY.format(ids=json.dumps(ids)))
    assert len(first.outcomes) == len(ids)
    assert second.tampering == ""
    assert list(second.outcomes.values()) == [WANTED[n % 5] for n in range(len(ids))]
    assert first.passed_ids == second.passed_ids


def test_hard_ids_keep_their_outcomes(tmp_path: Path) -> None:
    check_ids(tmp_path, list(HARD_IDS))


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=st.lists(st.text(max_size=12), min_size=5, max_size=25))
def test_any_ids_keep_their_outcomes(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str]
) -> None:
    check_ids(tmp_path_factory.mktemp("ids"), ids)


def test_brackets_in_the_name_of_a_file_or_folder_are_none_of_a_parameter(tmp_path: Path) -> None:
    places = ("tests/test_[a].py", "tests/[b]/test_]c[.py", "tests/test_plain.py")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(BODY.format(ids=json.dumps(["x", "[y]"])))
    (tmp_path / "tests/test_broken.py").write_text("raise ImportError('is not asked for')\n")
    repository = write_package(tmp_path, SOURCE, BODY.format(ids=json.dumps(["x"])))

    async def run() -> None:
        server = TestServer(repository)
        try:
            await server.start()
            mine = [test for test in server.tests if test.startswith(places)]
            assert len(mine) == 2 * len(places)
            for ids in (mine, mine[1:2], [f"{places[0]}::test_one[x]"]):
                for report in (
                    await server.run({}, ids, 60.0),
                    await run_plainly(repository, {}, ids, 10.0),
                ):
                    wanted = [WANTED["[[y]]" in test] for test in ids]
                    assert (list(report.outcomes.values()), report.tampering) == (wanted, "")
        finally:
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("test", "function"),
    [
        ("tests/test_[a].py::Test::test_b[x::y[z]]", "tests/test_[a].py::Test::test_b"),
        ("tests/test_a.py::test_b[x]", "tests/test_a.py::test_b"),
        ("tests/test_[a].py", "tests/test_[a].py"),
    ],
)
def test_the_function_of_an_id_keeps_the_name_of_its_file(test: str, function: str) -> None:
    assert function_of(test) == function


def test_more_ids_than_a_command_line_holds(tmp_path: Path) -> None:
    check_ids(tmp_path, [f"{number} {'x' * 300}" for number in range(450)])


LEFT = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()",
    "atexit": "import atexit, time\natexit.register(time.sleep, 300)",
    "pool": "import concurrent.futures as f, time\nf.ThreadPoolExecutor().submit(time.sleep, 300)",
    "processes": "import multiprocessing, time\n"
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,)).start()",
    "daemon": "import subprocess\nsubprocess.Popen(['sleep', '300'])",
    "output": "import sys\nsys.stdout.write('PASSED x - y\\n' * 200_000)",
}


@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("place", ["test", "import"])
@pytest.mark.sampled(3)  # at both places; 2 would choose one kind
def test_nothing_left_behind_holds_a_run(tmp_path: Path, kind: str, place: str) -> None:
    body = LEFT[kind] if place == "test" else "pass"
    lines = "\n    ".join(body.split("\n"))
    head = LEFT[kind] if place == "import" else ""
    tests = (
        f"{head}\nfrom pkg.code import double\n\n\ndef test_left():\n    {lines}\n"
        "    assert double(1) == 2\n\n\ndef test_after():\n    assert double(2) == 4\n"
    )
    repository = write_package(tmp_path, SOURCE, tests)
    ids = [f"{TESTS}::{name}" for name in ("test_left", "test_after")]
    request = {
        "root": CALL_ROOT,
        "functions": [["pkg/code.py", 1, "double"]],
        "tests": [f"{CALL_ROOT}/{TESTS}"],
        "most": 9,
    }

    async def run() -> None:
        started = time.monotonic()
        report = await run_plainly(repository, {}, ids, 10.0)
        assert set(report.outcomes.values()) == {TestOutcome.PASSED}, report
        assert report.tampering == ""
        async with open_box(repository) as box:
            lines, done = await run_call_program(box, "record", request, 60.0)
        assert done.exit_code == 0
        assert len(lines[0]["calls"]) == 2
        assert time.monotonic() - started < 40.0

    asyncio.run(run())


def test_a_process_that_ends_early_keeps_what_was_seen_and_passes_nothing_else(
    tmp_path: Path,
) -> None:
    tests = (
        "import os\n\n\ndef test_first():\n    pass\n\n\ndef test_ends():\n    os._exit(0)\n\n\n"
        "def test_last():\n    pass\n"
    )
    _, report = run_both(tmp_path, tests, ["test_first", "test_ends", "test_last"])
    assert list(report.outcomes.values()) == [
        TestOutcome.PASSED,
        TestOutcome.MISSING,
        TestOutcome.MISSING,
    ]
    assert "canaries" in report.tampering


def test_a_result_written_without_the_key_is_told(tmp_path: Path) -> None:
    forged = {"key": "0", "test": f"{TESTS}::test_forged", "outcome": "passed"}
    tests = (
        "import glob\n\n\ndef test_forged():\n    for name in glob.glob('/tmp/second/*.answer'):\n"
        f"        with open(name, 'a') as file:\n            file.write({json.dumps(forged)!r} + '\\n')\n"
        "    assert False\n"
    )
    _, report = run_both(tmp_path, tests, ["test_forged"])
    assert list(report.outcomes.values()) == [TestOutcome.FAILED]
    assert report.tampering == "1 results without the key"
