"""A run collects the tests that it was asked for and no others, and tells of them what a run of all tells."""

import pytest

from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from tests.fakes.repositories import running_server

CONFTEST = """
import pytest

@pytest.fixture(autouse=True)
def begun(request):
    request.node.begun = True

@pytest.fixture(params=["a::b", "c[d"], scope="module")
def odd(request):
    return request.param
"""
FIRST = """
import unittest

import pytest

from pkg import code

STATE = []

def setup_module():
    STATE.append("module")

@pytest.fixture(autouse=True, scope="module")
def prepared():
    STATE.append("fixture")

def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", [1, 2])

def test_state():
    assert STATE[:2] == ["module", "fixture"] or STATE[:2] == ["fixture", "module"]

def test_number(number):
    assert code.double(number) == 2 * number

def test_odd(odd):
    assert odd != "c[d"

@pytest.mark.parametrize("text", ["x", "y::test_state", "z[0]", "ä"])
def test_text(text, request):
    assert request.node.begun
    assert text

class Shared:
    def test_inherited(self):
        assert self.wanted == 4

class TestOuter(Shared):
    wanted = 4

    def test_own(self):
        assert code.double(2) == self.wanted

    class TestInner(Shared):
        wanted = 5

        def test_deep(self):
            assert code.double(1) == 2

class TestOuterToo(TestOuter):
    pass

class Cases(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.wanted = code.double(3)

    def test_case(self):
        self.assertEqual(self.wanted, 6)

    def test_failing_case(self):
        self.assertEqual(self.wanted, 7)

class MoreCases(Cases):
    def test_more(self):
        self.assertEqual(self.wanted, 6)

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""
SECOND = """
from pkg import code

def test_state():
    assert code.SEEN == []
"""
FILES = {
    "pkg/__init__.py": "",
    "pkg/code.py": "SEEN = []\n\ndef double(number):\n    return 2 * number\n",
    "tests/test_first.py": FIRST,
    "tests/deep/test_first.py": SECOND,
    "tests/deep/__init__.py": "",
    "tests/other_test.py": SECOND,
}


@pytest.fixture(params=["with a conftest.py", "without"])
def server(runner, tmp_path, request):
    given = {"tests/conftest.py": CONFTEST} if request.param == "with a conftest.py" else {}
    for path, text in {**FILES, **given}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    repository = PreparedRepository.from_directory("pkg", tmp_path, ("pkg",), ("tests",))
    with running_server(runner, repository) as server:
        yield server


def test_a_test_alone_has_the_outcome_that_it_has_among_all(runner, server: TestServer):
    whole = runner.run(server.run({}, server.tests))
    assert len(server.tests) >= 20
    assert {TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.SKIPPED} <= set(
        whole.outcomes.values()
    )
    assert not whole.tampering
    for test in server.tests:
        report = runner.run(server.run({}, [test]))
        assert report.outcomes == {test: whole.outcomes[test]}
        assert not report.tampering
    backwards = runner.run(server.run({}, server.tests[::-1]))
    assert backwards.outcomes == whole.outcomes


def test_a_file_whose_other_tests_cannot_be_made_has_an_error_everywhere(runner, server):
    """What a file's import runs is run, whatever tests of it are asked for."""
    broken = {"pkg/code.py": b"SEEN = []\n"}
    for test in ("tests/test_first.py::test_state", "tests/test_first.py::Cases::test_case"):
        report = runner.run(server.run({"pkg/code.py": b"import nowhere\n"}, [test]))
        assert report.outcomes == {test: TestOutcome.ERROR}
    report = runner.run(server.run(broken, ["tests/test_first.py::Cases::test_case"]))
    assert set(report.outcomes.values()) == {TestOutcome.ERROR}
