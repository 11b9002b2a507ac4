"""Python source parses in many threads at once, as in one."""

import ast
import gc
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.syntax import evaluate_literal, parse_python
from ostinato.tasks.grading.cheating.monitors import is_distinctive

NUM_THREADS = 4
NUM_PARSES = 100
FUNCTION = (
    "def f{i}(a, b):\n    return [x + ({i} * (a - b)) for x in range(a) if x or (b and (a or x))]\n"
)


class Cycle:
    """Garbage whose finaliser is Python code: a thread that builds a tree gives way to another."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(200))


@pytest.fixture
def eager_switches():
    """Threads that change places at nearly every chance, as they do under load."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.nightly
def test_parsing_in_threads_equals_parsing_alone(eager_switches):
    text = "".join(FUNCTION.format(i=i) for i in range(20))
    wanted = ast.dump(ast.parse(text))
    found: list[str] = []

    def parse_often() -> None:
        for _ in range(NUM_PARSES):
            Cycle()
            tree = parse_python(text)
        found.append(ast.dump(tree))

    threads = [threading.Thread(target=parse_often) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * NUM_THREADS


def test_grading_reads_literals_while_other_threads_parse(eager_switches):
    failures: list[Exception] = []

    def run_often(work: Callable[[], object]) -> None:
        try:
            for _ in range(NUM_PARSES):
                Cycle()
                work()
        except SystemError as error:
            failures.append(error)

    text = "".join(FUNCTION.format(i=i) for i in range(20))
    literal = repr([[n, {str(n): (n, n)}] for n in range(200)])
    works = [lambda: parse_python(text), lambda: is_distinctive(literal)] * 2
    threads = [threading.Thread(target=run_often, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists))
def test_literals_read_as_they_were_written(value):
    assert evaluate_literal(repr(value)) == value
    assert evaluate_literal(ast.parse(repr(value), mode="eval").body) == value


@pytest.mark.parametrize("text", ["", "a", "f()", "1; 2", "x = 1", "1 + 'a'"])
def test_what_is_no_literal_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        evaluate_literal(text)


def test_a_syntax_error_frees_the_next_parse():
    with pytest.raises(SyntaxError):
        parse_python("def f(:\n")
    assert isinstance(parse_python("x = 1"), ast.Module)
