"""A pytest plugin of the second runner (plain_run.py). It runs the requested tests in their order, writes the outcome of
each as a line of JSON, and ends the process after the last one, so that nothing a test leaves behind can delay the end.

Standard library and pytest only. It runs in a box, in the process of the code under test, so its lines alone prove
nothing: they carry a key, without which a line in the file does not count, and blind canaries run with the tests.
"""

import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

_WORST = ("error", "failed", "skipped", "passed")


class Reporter:
    """Outcomes of one process. The worst outcome counts when several items have the same id."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._places = {test: place for place, test in enumerate(request["tests"])}
        self._key, self._canaries = request["key"], request["canaries"]
        self._files = frozenset(request["files"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(request["answer"], flags, 0o600)
        self._outcomes: dict[str, str] = {}
        self._process_id = os.getpid()

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for other files of a folder that is collected for one file in it."""
        return (collection_path.is_file() and str(collection_path) not in self._files) or None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the requested tests, in their order, followed by the canaries. Fixtures that the repository's settings
        give to every test are taken from the canaries, which could not find them.
        """
        kept = [item for item in items if item.nodeid in self._places]
        kept.sort(key=lambda item: self._places[item.nodeid])
        canaries = [item for item in items if item.path.name == self._canaries]
        for item in canaries:
            if isinstance(item, pytest.Function):
                item.fixturenames.clear()
        items[:] = kept + canaries

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the result of one phase of a test. A subtest counts only if it failed."""
        is_subtest = hasattr(report, "context")
        if report.failed:
            self._note(report.nodeid, "failed" if report.when == "call" else "error")
        elif not is_subtest and (report.skipped or hasattr(report, "wasxfail")):
            self._note(report.nodeid, "skipped")
        elif not is_subtest and report.when == "call":
            self._note(report.nodeid, "passed")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Writes the outcome of a test that has ended."""
        line = {"key": self._key, "test": nodeid, "outcome": self._outcomes.get(nodeid, "error")}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Ends the process after the last test, without waiting for threads, pools and exit handlers."""
        try:
            return (yield)
        finally:
            self._end()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Ends the process if no test could run."""
        self._end()
        return (yield)

    def _note(self, test: str, outcome: str) -> None:
        known = self._outcomes.get(test, outcome)
        self._outcomes[test] = min(known, outcome, key=_WORST.index)

    def _end(self) -> None:
        if os.getpid() == self._process_id:
            os._exit(0)


def pytest_configure(config: pytest.Config) -> None:
    """Reads the request from the JSON file next to this one, and removes it."""
    place = Path(__file__).with_suffix(".json")
    sys.path.remove(str(place.parent))
    config.pluginmanager.register(Reporter(json.loads(place.read_text())))
    place.unlink()
