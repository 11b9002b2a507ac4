"""A skipped test fails the run, unless tests/allowed_skips.txt names it. No example of Hypothesis has a
time limit of its own: a busy machine is no fault.
"""

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ALLOWED = Path(__file__).with_name("allowed_skips.txt")

# processes that tests start import `tests` too
_PATHS = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)
# and a pytest that a test starts may lack the plugins that these options are for; this one has read them
os.environ.pop("PYTEST_ADDOPTS", None)


LONG = ("slow", "browser")


@pytest.hookimpl(wrapper=True)  # around the choice of -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Of a test marked sampled(N), N of its cases stay, spread over their order; the others are nightly. Files with
    long tests that run come first: one that a process begins last would be waited for.
    """
    _sample(items)
    yield
    long = {item.path for item in items if any(map(item.get_closest_marker, LONG))}
    items.sort(key=lambda item: item.path not in long)


def _sample(items: list[pytest.Item]) -> None:
    groups: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for cases in groups.values():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        kept = {len(cases) * number // marker.args[0] for number in range(marker.args[0])}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.nightly)


def pytest_runtest_setup() -> None:
    """Random tensors of a test do not depend on the tests before it."""
    if torch := sys.modules.get("torch"):  # many tests never import it
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop per module."""
    with asyncio.Runner() as runner:
        yield runner


def _unlisted_skips(config: pytest.Config) -> list[str]:
    """Node ids that were skipped and stand in no line of the list."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if not isinstance(reporter, TerminalReporter):
        return []
    allowed = tuple(
        line.partition("  ")[0]
        for line in ALLOWED.read_text().splitlines()
        if line and not line.startswith("#")
    )
    skipped = [report.nodeid for report in reporter.stats.get("skipped", [])]
    return sorted(name for name in skipped if not name.startswith(allowed))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unlisted_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    for name in _unlisted_skips(terminalreporter.config):
        terminalreporter.write_line(f"SKIPPED, and not in {ALLOWED.name}: {name}", red=True)
