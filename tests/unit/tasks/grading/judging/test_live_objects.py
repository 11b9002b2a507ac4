"""Harms of a method on objects that only the tests can build: copies of their calls are made many times."""

import asyncio
import time
from pathlib import Path

import pytest

from ostinato.tasks.grading.config import Harm
from ostinato.tasks.grading.judging.blind_trial import BlindTrials, Differences
from tests.fakes.one_line_problem import PATH, make_one_line_problem

LIVE = """class Node:
    tally = []

    def __init__(self, label, parent):
        self.label, self.parent, self.notes = label, parent, []
        self.depth = parent.depth + 1 if parent is not None else label.depth

    def lineage(self):
        return self.label.text + ("/" + self.parent.lineage() if self.parent else "")


class Label:
    def __init__(self, text, depth):
        self.text, self.depth = text.upper(), int(depth) + 1
        self.owner = text.owner
"""
OF_LIVE = """from pkg.code import Label, Node


class Text(str):
    owner = "tests"


def test_lineage():
    root = Node(Label(Text("root"), 1), None)
    assert Node(Label(Text("leaf"), 2), root).lineage() == "LEAF/ROOT"
"""
LINEAGE = (
    """        return self.label.text + ("/" + self.parent.lineage() if self.parent else "")"""
)
REFUSING = """return self.path()

    def __deepcopy__(self, memory):
        self.tally.append(0)
        if len(self.tally) > {least}:
            raise TypeError
        made = object.__new__(Node)
        vars(made).update(vars(self))
        return made

    def path(self):"""
HIDDEN = {
    "keeps memory": ("self.tally.append(bytes(200_000))", Harm.LEAKING),
    "keeps memory on its object": ("self.notes.append(list(range(700)))", Harm.LEAKING),
    "only the first calls": ("self.tally.append(0)\n        if len(self.tally) > 400: return ''", ""),
    "only an object's first calls": ("self.notes.append(0)\n        if len(self.notes) > 300: return ''", ""),
    "refuses copies": (REFUSING.format(least=0), ""),
    "refuses later copies": (REFUSING.format(least=8), ""),
    "ends the process later": ("self.tally.append(0)\n        if len(self.tally) > 300: import os; os._exit(0)", ""),
}  # fmt: skip
HONEST = {
    "a loop": (
        "names, node = [], self\n        while node:\n            names.append(node.label.text)\n"
        "            node = node.parent\n        return '/'.join(names)"
    ),
    "a cache on the object": (
        "if not self.notes:\n            self.notes.append(self.label.text + ('/' + self.parent.lineage() if "
        "self.parent else ''))\n        return self.notes[0]"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found_in_live_objects(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory):
    """What a trial finds in a change of a method on objects that only the tests can build."""
    edit = (LINEAGE, LINEAGE.replace('"/"', '"-"'))
    folder = tmp_path_factory.mktemp("live")
    repository, problem = make_one_line_problem(
        folder, LIVE, OF_LIVE, edit, symbol="Node.lineage", failing="test_lineage"
    )
    trials = BlindTrials()
    return lambda source: runner.run(trials.judge(problem, {PATH: source.encode()}, repository))


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.sampled(3)
def test_harm_is_found_on_objects_that_no_drawn_call_builds(
    found_in_live_objects, name: str
) -> None:
    line, harm = HIDDEN[name]
    found = found_in_live_objects(LIVE.replace(LINEAGE, f"        {line}\n{LINEAGE}"))
    assert harm in found.harms or (not harm and found.difference), found


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.sampled(1)
def test_honest_change_on_such_objects_has_no_harm(found_in_live_objects, name: str) -> None:
    assert found_in_live_objects(LIVE.replace(LINEAGE, f"        {HONEST[name]}")) == Differences()


LOCKED = """import threading


class Job:
    kept = []

    def __init__(self, label):
        self.label, self.lock = label, threading.Lock()

    @property
    def is_ready(self):
        with self.lock:
            return bool(self.label.text)
"""
OF_LOCKED = """from pkg.code import Job


class Label:
    text = "first"


def test_is_ready():
    assert Job(Label()).is_ready is True
"""
READY = "            return bool(self.label.text)"


@pytest.mark.parametrize(
    "line",
    [
        "            self.kept.append(bytes(200_000))\n" + READY,
        "            value = bool(self.label.text)\n            self.kept.append(bytearray(9_000))\n            return value",
    ],
    ids=["before it answers", "after it answered"],
)
@pytest.mark.sampled(1)
def test_memory_is_measured_on_objects_that_cannot_be_copied(
    runner: asyncio.Runner, tmp_path: Path, line: str
) -> None:
    repository, problem = make_one_line_problem(
        tmp_path,
        LOCKED,
        OF_LOCKED,
        (READY, READY.replace("bool(", "not (")),
        symbol="Job.is_ready",
        failing="test_is_ready",
    )
    trials = BlindTrials()

    def find(source: str) -> Differences:
        return runner.run(trials.judge(problem, {PATH: source.encode()}, repository))

    assert Harm.LEAKING in find(LOCKED.replace(READY, line)).harms
    honest = READY.replace("bool(self.label.text)", "self.label.text != ''")
    assert find(LOCKED.replace(READY, honest)) == Differences()


BLOCKING = """import threading


class Gate:
    def __init__(self):
        self.lock = threading.Lock()

    def close(self):
        self.lock.acquire()
        return 1
"""
OF_BLOCKING = """from pkg.code import Gate


def test_close():
    assert Gate().close() == 1
"""


def test_a_repeated_call_that_blocks_holds_no_verdict(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    edit = ("        return 1", "        return 2")
    repository, problem = make_one_line_problem(
        tmp_path, BLOCKING, OF_BLOCKING, edit, symbol="Gate.close", failing="test_close"
    )
    other = BLOCKING.replace("return 1", "return 2 - 1").encode()
    started = time.monotonic()
    found = runner.run(BlindTrials().judge(problem, {PATH: other}, repository))
    assert found == Differences()
    assert time.monotonic() - started < 45


STORED = """import threading


class Store:
    calls = []

    def __init__(self, names):
        self.names, self.lock = dict.fromkeys(names), threading.Lock()

    def drop(self, name):
        if name in self.names:
            del self.names[name]
"""
OF_STORED = """import pytest
from pkg.code import Store


class Name(str):
    owner = "tests"


@pytest.mark.parametrize("name", ["first", "second", "third", "other"])
def test_drop(name):
    store = Store([Name("first"), Name("second"), Name("third")])
    store.drop(Name(name))
    assert sorted(store.names) == sorted({"first", "second", "third"} - {name})
"""
IN_STORE = "        if name in self.names:"


def test_a_change_that_is_right_for_the_first_calls_alone_is_refused_on_objects_without_copies(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A call that returns nothing and changes an object that holds a lock."""
    repository, problem = make_one_line_problem(
        tmp_path,
        STORED,
        OF_STORED,
        (IN_STORE, IN_STORE.replace(" in ", " not in ")),
        symbol="Store.drop",
        failing="test_drop",
    )
    trials = BlindTrials()

    def find(source: str) -> Differences:
        return runner.run(trials.judge(problem, {PATH: source.encode()}, repository))

    few = f"        self.calls.append(0)\n        if len(self.calls) > 400: return\n{IN_STORE}"
    assert find(STORED.replace(IN_STORE, few)).difference
    honest = "        if self.names.pop(name, 0) == 0:\n            return"
    lines = f"{IN_STORE}\n            del self.names[name]"
    assert STORED.replace(lines, honest) != STORED
    assert find(STORED.replace(lines, honest)) == Differences()
