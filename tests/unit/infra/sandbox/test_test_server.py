"""The test server: outcomes, first failure, limits, and that each run is a fresh import."""

import asyncio
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox import fresh_runs
from ostinato.infra.sandbox.fresh_runs import FreshRuns
from ostinato.infra.sandbox.host.box import BoxProcess
from ostinato.infra.sandbox.protocol import Frame, SandboxLimits, TestOutcome
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems.config import RepositorySource
from tests.fakes.one_line_problem import write_package
from tests.fakes.repositories import LEDGERKIT, WORDKIT

COUNTING = "wordkit/counting.py"


def edit(repository: PreparedRepository, path: str, old: str, new: str) -> dict[str, bytes]:
    text = repository.files[path].decode()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return {path: text.replace(old, new).encode()}


def test_a_run_whose_box_is_lost_at_its_start_gets_another(
    runner, wordkit, monkeypatch: pytest.MonkeyPatch
):
    started: list[BoxProcess] = []

    class EndedAtStart(BoxProcess):
        def __init__(self, *arguments, **options) -> None:
            if not started:
                options["server"] = "no_such_module"
            super().__init__(*arguments, **options)
            started.append(self)

    server = TestServer(wordkit)
    monkeypatch.setattr(fresh_runs, "BoxProcess", EndedAtStart)
    runner.run(server.start())
    assert len(started) == 2
    assert len(server.tests) == 15
    runner.run(server.close())


def test_pristine_repository_passes_everything(runner, word_server):
    report = runner.run(word_server.run({}, word_server.tests))
    assert report.passed
    assert len(report.outcomes) == 15


def test_broken_function_fails_its_tests_only(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "total += 1", "total += 2")
    report = runner.run(word_server.run(files, word_server.tests))
    failed = {test for test, value in report.outcomes.items() if value is TestOutcome.FAILED}
    assert failed == {
        "tests/test_counting.py::test_count_words",
        "tests/test_counting.py::test_count_words_minimum",
    }
    assert report.route == "fresh"


def test_first_failure_names_type_message_and_place(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "total += 1", "totl += 1")
    report = runner.run(word_server.run(files, ["tests/test_counting.py::test_count_words"]))
    assert report.first_failure is not None
    assert report.first_failure.error_type == "UnboundLocalError"
    assert "totl" in report.first_failure.message
    line = wordkit.files[COUNTING].decode().split("\n").index("            total += 1") + 1
    assert (report.first_failure.frames[-1].path, report.first_failure.frames[-1].line_number) == (
        COUNTING,
        line,
    )


def test_lines_below_an_inserted_line_are_counted_in_the_edited_file(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "    total = 0\n", "    total = 0\n    total += 0\n")
    files[COUNTING] = files[COUNTING].replace(b'best = ""\n', b'best = ""\n')
    test = "tests/test_counting.py::test_longest_word"
    broken = {COUNTING: files[COUNTING].replace(b"len(word) > len(best)", b"len(word) > len(bst)")}
    report = runner.run(word_server.run(broken, [test]))
    assert report.first_failure is not None
    line = broken[COUNTING].decode().split("\n").index("        if len(word) > len(bst):") + 1
    assert report.first_failure.frames[-1].line_number == line


@pytest.mark.parametrize(
    ("old", "new", "error_type"),
    [
        ("total = 0", "total = (0", "SyntaxError"),
        (
            "def count_words(text",
            "import missing_module\n\n\ndef count_words(text",
            "ModuleNotFoundError",
        ),
        ("def count_words(text", "raise SystemExit(0)\n\n\ndef count_words(text", "SystemExit"),
    ],
)
def test_file_that_cannot_be_imported_is_an_error_everywhere(
    runner, word_server, wordkit, old, new, error_type
):
    report = runner.run(word_server.run(edit(wordkit, COUNTING, old, new), word_server.tests))
    assert set(report.outcomes.values()) == {TestOutcome.ERROR}
    assert report.first_failure is not None
    assert report.first_failure.error_type == error_type


def test_syntax_error_has_its_place(runner, word_server, wordkit):
    report = runner.run(
        word_server.run(edit(wordkit, COUNTING, "total = 0", "total = = 0"), word_server.tests)
    )
    line = wordkit.files[COUNTING].decode().split("\n").index("    total = 0") + 1
    assert report.first_failure is not None
    assert (report.first_failure.frames[-1].path, report.first_failure.frames[-1].line_number) == (
        COUNTING,
        line,
    )


@pytest.mark.parametrize(
    "body", ["while True: pass", "return list(iter(int, 1))", "import time; time.sleep(60)"]
)
@pytest.mark.sampled(2)
def test_endless_test_is_a_timeout(runner, word_server, wordkit, body):
    files = edit(wordkit, COUNTING, "    total = 0\n", f"    {body}\n")
    tests = [
        "tests/test_counting.py::test_longest_word",
        "tests/test_counting.py::test_count_words",
    ]
    report = runner.run(word_server.run(files, tests, time_limit_seconds=2))
    assert report.outcomes[tests[0]] is TestOutcome.PASSED
    assert report.outcomes[tests[1]] in (TestOutcome.TIMEOUT, TestOutcome.FAILED)
    assert not report.passed


def run_small(runner, directory, source: str, tests: str):
    """The report of all tests of a module pkg.code."""
    server = TestServer(write_package(directory, source, tests))

    async def run():
        await server.start()
        try:
            return await server.run({}, server.tests)
        finally:
            await server.close()

    return runner.run(run())


def test_a_test_that_needs_a_little_longer_passes_and_so_do_those_behind_it(runner, tmp_path):
    # CPU time that a busy machine stretches from below one second
    source = "import time\ndef work():\n    while time.process_time() - began < 1.6: pass\n"
    tests = (
        "import time\nfrom pkg import code\n"
        "def test_a():\n    code.began = time.process_time()\n    code.work()\n"
        "def test_b(): pass\n"
    )
    report = run_small(runner, tmp_path, source, tests)
    assert list(report.outcomes.values()) == [TestOutcome.PASSED] * 2


def test_a_failure_in_code_without_lines_has_the_place_of_its_function(runner, tmp_path):
    source = "def fail():\n    raise ValueError\nfail.__code__ = fail.__code__.replace(co_linetable=b'')\n"
    report = run_small(
        runner, tmp_path, source, "from pkg import code\ndef test_a():\n    code.fail()\n"
    )
    assert report.first_failure.frames[-1] == Frame(path="pkg/code.py", line_number=1)


def test_unknown_test_is_missing(runner, word_server):
    report = runner.run(word_server.run({}, ["tests/test_counting.py::test_gone"]))
    assert report.outcomes == {"tests/test_counting.py::test_gone": TestOutcome.MISSING}
    assert not report.passed


def test_changed_tests_and_runner_files_count_for_nothing(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "total += 1", "total += 2")
    cheat = {
        "tests/test_counting.py": b"def test_count_words(): pass\n",
        "conftest.py": b"import os; os._exit(0)\n",
    }
    honest = runner.run(word_server.run(files, word_server.tests))
    assert (
        runner.run(word_server.run({**files, **cheat}, word_server.tests)).outcomes
        == honest.outcomes
    )


def test_same_content_is_answered_from_the_cache(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "total += 1", "total += 3")
    first = runner.run(word_server.run(files, word_server.tests))
    second = runner.run(word_server.run(dict(files), word_server.tests))
    assert second is first


def test_same_content_asked_for_at_once_runs_once(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "total += 1", "total += 4")

    async def ask_together():
        first = asyncio.create_task(word_server.run(files, word_server.tests))
        others = [asyncio.create_task(word_server.run(files, word_server.tests)) for _ in range(4)]
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.gather(*others)

    reports = runner.run(ask_together())
    assert len({report.seconds for report in reports}) == 1


def test_run_leaves_no_trace_in_later_runs(runner, word_server, wordkit):
    files = edit(
        wordkit,
        COUNTING,
        "    total = 0\n",
        "    import wordkit.shaping as s; s.make_slug = None; total = 0\n",
    )
    runner.run(word_server.run(files, word_server.tests))
    pristine = runner.run(word_server.run_again({}, word_server.tests))
    assert pristine.passed


def test_gold_text_is_not_readable_from_a_run(runner, word_server, wordkit):
    peek = "    total = 0\n    raise ValueError(open(__file__).read()[:50] + '|')\n"
    files = edit(wordkit, COUNTING, "    total = 0\n", peek)
    report = runner.run(word_server.run(files, ["tests/test_counting.py::test_count_words"]))
    assert report.first_failure is not None
    assert report.first_failure.message == "|"


def test_new_module_is_importable(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, '"""Counting words."""\n', "from wordkit.extra import ONE\n")
    files[COUNTING] = files[COUNTING].replace(b"total += 1", b"total += ONE")
    files["wordkit/extra.py"] = b"ONE = 1\n"
    report = runner.run(word_server.run(files, word_server.tests))
    assert report.passed
    assert report.route == "fresh"


def test_function_that_ran_on_import_is_imported_afresh(runner, ledger_server, ledgerkit):
    files = edit(ledgerkit, "ledgerkit/money.py", "name[:1].upper()", "name[:1]")
    report = runner.run(ledger_server.run(files, ledger_server.tests))
    assert report.route == "fresh"
    assert not report.passed


def test_method_property_and_decorated_function_are_those_of_the_change(
    runner, ledger_server, ledgerkit
):
    cases = [
        ("ledgerkit/book.py", "cents - self.balance", "cents"),
        ("ledgerkit/book.py", 'yield f"{account}: ', 'yield f"{account} '),
        ("ledgerkit/money.py", "divmod(abs(cents), 100)", "divmod(cents, 100)"),
    ]
    for path, old, new in cases:
        report = runner.run(ledger_server.run(edit(ledgerkit, path, old, new), ledger_server.tests))
        assert not report.passed, old


def test_default_value_is_that_of_the_change(runner, word_server, wordkit):
    files = edit(wordkit, COUNTING, "limit=3", "limit=1")
    report = runner.run(word_server.run(files, word_server.tests))
    assert report.route == "fresh"
    assert report.outcomes["tests/test_counting.py::test_most_common"] is TestOutcome.FAILED


def with_conftest(repository: PreparedRepository, source: RepositorySource, folder: Path):
    """A copy of the repository whose conftest.py imports its package."""
    conftest = {f"{source.test_paths[0]}/conftest.py": f"import {source.name}\n".encode()}
    for path, content in {**repository.files, **conftest}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return PreparedRepository.from_directory(
        "confkit", folder, source.package_paths, source.test_paths
    )


@pytest.fixture
def confkit(wordkit, tmp_path):
    return with_conftest(wordkit, WORDKIT, tmp_path)


def test_function_that_ran_while_conftest_imported_it_is_imported_afresh(
    runner, ledgerkit, tmp_path
):
    kit = with_conftest(ledgerkit, LEDGERKIT, tmp_path)

    async def run():
        server = TestServer(kit)
        try:
            await server.start()
            files = edit(kit, "ledgerkit/money.py", "name[:1].upper()", "name[:1]")
            return await server.run(files, server.tests)
        finally:
            await server.close()

    report = runner.run(run())
    assert report.route == "fresh"
    assert not report.passed


def test_data_that_looks_like_a_test_is_there_for_the_tests(runner, confkit):
    reads = b"from pathlib import Path\n\n\ndef test_case():\n"
    reads += b"    assert Path('tests/cases/first.py').read_text().startswith('def test')\n"
    files = {
        **confkit.files,
        "tests/cases/first.py": b"def test_keys():\n\tpass\n        # spoilt\n",
        "tests/test_cases.py": reads,
    }
    for path, content in files.items():
        (confkit.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (confkit.directory / path).write_bytes(content)
    kit = PreparedRepository.from_directory("kit", confkit.directory, ("wordkit",), ("tests",))

    async def run():
        server = TestServer(kit)
        try:
            await server.start()
            return await server.run({COUNTING: kit.files[COUNTING] + b"LIMIT = 3\n"}, server.tests)
        finally:
            await server.close()

    report = runner.run(run())
    assert (report.route, report.passed) == ("fresh", True), report.first_failure


@pytest.mark.parametrize(
    ("addition", "error_type"),
    [
        (b"\ndef broken(:\n", "SyntaxError"),
        (b"\nimport missing_module\n", "ModuleNotFoundError"),
        (b"\nraise SystemExit(0)\n", "SystemExit"),
    ],
)
def test_edit_that_conftest_cannot_import_is_an_error_everywhere(
    runner, confkit, addition, error_type
):
    async def run():
        server = TestServer(confkit)
        try:
            await server.start()
            files = {COUNTING: confkit.files[COUNTING] + addition}
            return server.tests, await server.run(files, server.tests)
        finally:
            await server.close()

    tests, report = runner.run(run())
    assert dict.fromkeys(tests, TestOutcome.ERROR) == report.outcomes
    assert report.first_failure is not None
    assert report.first_failure.error_type == error_type


def test_data_files_of_packages_are_found(runner, tmp_path):
    read = b"from importlib import resources\n\n\ndef read():\n    return "
    files = {
        "kit/__init__.py": read + b"resources.files(__package__).joinpath('a.txt').read_text()\n",
        "kit/a.txt": b"here",
        "kit/deep/__init__.py": b"",
        "kit/deep/b.bin": b"\x00",
        "tests/test_kit.py": b"from importlib import resources\n\nimport kit\n\n\n"
        b"def test_near():\n    assert kit.read() == 'here'\n\n\n"
        b"def test_deep():\n    assert resources.read_binary('kit.deep', 'b.bin') == bytes(1)\n",
    }
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    repository = PreparedRepository.from_directory("kit", tmp_path, ("kit",), ("tests",))

    async def run():
        server = TestServer(repository)
        try:
            await server.start()
            return await server.run({}, server.tests)
        finally:
            await server.close()

    report = runner.run(run())
    assert list(report.outcomes.values()) == [TestOutcome.PASSED] * 2


def test_repository_whose_conftest_fails_is_a_clear_error(runner, wordkit, tmp_path):
    for path, content in {**wordkit.files, "tests/conftest.py": b"import no_such\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    repository = PreparedRepository.from_directory("badkit", tmp_path, ("wordkit",), ("tests",))
    with pytest.raises(ProblemError, match=r"badkit: pytest collected no test.*no_such"):
        runner.run(TestServer(repository).start())


def test_repository_without_tests_is_a_clear_error(runner, tmp_path):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_bytes(b"")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bad.py").write_bytes(b"import nothing_here\n")
    repository = PreparedRepository.from_directory("kit", tmp_path, ("kit",), ("tests",))
    with pytest.raises(ProblemError, match=r"kit: pytest collected no test.*nothing_here"):
        runner.run(TestServer(repository).start())


def test_probe_tells_called_functions(runner, word_server):
    probes = runner.run(word_server.probe(word_server.tests))
    called = {name for _, _, name in probes["tests/test_shaping.py::test_pad_center"].called}
    assert called == {"test_pad_center", "pad_center"}


def test_no_frame_below_a_test_holds_the_pristine_sources(runner, wordkit):
    path = "wordkit/counting.py"
    look = (
        b"import sys\nframe = sys._getframe()\nfound = []\n"
        b"while frame is not None:\n"
        b"    found += [n for n, v in frame.f_locals.items() if n != 'look' "
        b"and 'total ' + '+= 1' in repr(v)]\n    frame = frame.f_back\n"
        b"raise RuntimeError(f'held by {found}')\n"
    )
    server = TestServer(wordkit)

    async def run():
        try:
            await server.start()
            return await server.run({path: look}, ["tests/test_counting.py::test_count_words"])
        finally:
            await server.close()

    assert runner.run(run()).first_failure.message == "held by []"


def test_box_of_a_run_that_was_given_up_gets_no_other(runner, wordkit):
    async def give_up():
        runs = FreshRuns(wordkit, SandboxLimits(), 1, hides_tests=False)
        tests = ["tests/test_counting.py::test_count_words"]
        endless = edit(wordkit, COUNTING, "total = 0", "import time; time.sleep(600)")
        try:
            first = asyncio.create_task(runs.run({**wordkit.files, **endless}, tests, 300))
            await asyncio.sleep(3.0)
            first.cancel()
            return await asyncio.wait_for(runs.run(wordkit.files, tests, 60), 50)
        finally:
            await runs.close()

    assert runner.run(give_up())["outcomes"] == {
        "tests/test_counting.py::test_count_words": "passed"
    }


@pytest.mark.parametrize(
    ("tests_may_write", "wanted"),
    [
        (False, {"CAP_SYS_ADMIN", "CAP_NET_ADMIN"}),
        (True, {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_DAC_OVERRIDE"}),
    ],
)
def test_the_server_of_a_box_has_only_the_capabilities_that_its_runs_need(
    runner, wordkit, monkeypatch: pytest.MonkeyPatch, tests_may_write: bool, wanted: set[str]
):
    numbers = {"CAP_DAC_OVERRIDE": 1, "CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
    held: list[int] = []

    class Noted(BoxProcess):
        def kill(self) -> None:
            status = Path(f"/proc/{self.process_id}/status").read_text()
            held.append(int(status.split("CapEff:")[1].split()[0], 16))
            super().kill()

    monkeypatch.setattr(fresh_runs, "BoxProcess", Noted)
    server = TestServer(wordkit, tests_may_write=tests_may_write)
    writes = b"from pathlib import Path\nPath('/repo/written').write_text('')\n"
    path = "wordkit/__init__.py"
    try:
        changed = {path: wordkit.files[path] + b"\n" + writes}
        report = runner.run(server.run(changed, ["tests/test_counting.py::test_count_words"]))
        assert report.passed == tests_may_write
    finally:
        runner.run(server.close())
    assert held == [sum(1 << numbers[name] for name in wanted)]
