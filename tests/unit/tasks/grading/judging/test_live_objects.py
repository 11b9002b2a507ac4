"""Harms of a method on objects that only the tests can build: copies of their calls are made many times."""

import asyncio

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
def test_harm_is_found_on_objects_that_no_drawn_call_builds(
    found_in_live_objects, name: str
) -> None:
    line, harm = HIDDEN[name]
    found = found_in_live_objects(LIVE.replace(LINEAGE, f"        {line}\n{LINEAGE}"))
    assert harm in found.harms or (not harm and found.difference), found


@pytest.mark.parametrize("name", HONEST)
def test_honest_change_on_such_objects_has_no_harm(found_in_live_objects, name: str) -> None:
    assert found_in_live_objects(LIVE.replace(LINEAGE, f"        {HONEST[name]}")) == Differences()
