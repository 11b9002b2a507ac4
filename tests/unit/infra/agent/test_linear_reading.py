"""Reading an answer takes time linear in its length, whatever a model repeats in it, and never raises."""

import time
from collections.abc import Callable

import pytest

from ostinato.infra.agent.dialects.dialect import Dialect
from ostinato.infra.agent.dialects.edits.blocks import GUIDES, read_edits
from ostinato.infra.agent.dialects.edits.functions import _likeness
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.dialects.thoughts import parse_outside
from ostinato.infra.agent.extensions import DIALECTS

ARGUMENTS = {"path": "a.py", "old": "x < 1", "new": 'y "2"'}
LENGTH, TIMES = 4_000, 8
MOST_GROWTH = 24  # of eightfold texts: 8 if linear, 64 if quadratic
LEAST_SECONDS = 0.004  # shorter times are noise
COMMON = ("<think>", "</think>", "<br>", "{", "<call ", "<a_", "to=functions.a", '{"name": "x", ')


def call_of(dialect: Dialect) -> str:
    if dialect.write is not None:
        return dialect.write("edit_file", ARGUMENTS)
    return "<edit_file><path>a.py</path><old>x < 1</old><new>y</new></edit_file>"


def seconds_of(read: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    read(text)
    return time.thread_time() - began


def check_growth(read: Callable[[str], object], piece: str, head: str = "") -> None:
    texts = [head + piece * (times * LENGTH // len(piece)) for times in (1, TIMES)]
    small, large = (seconds_of(read, text) for text in texts)
    assert large < MOST_GROWTH * max(small, LEAST_SECONDS), (head, piece, small, large)


@pytest.mark.parametrize("name", DIALECTS.built_in)
def test_a_dialect_reads_every_repeated_beginning_of_a_call_in_linear_time(name: str) -> None:
    dialect: Dialect = DIALECTS.load(name)
    call = call_of(dialect)
    cuts = [call[:size] for size in range(1, len(call) + 1, max(1, len(call) // 12))]
    pieces = [*cuts, *(cut + tail for cut in cuts for tail in ('"', ";\n", "</call>")), *COMMON]
    tools = FULL_TOOLS if dialect.tools is None else dialect.tools

    def read(text: str) -> object:
        return parse_outside(
            text, dialect.find_calls, lambda rest: dialect.parse(rest, tools), is_opened=False
        )

    for piece in pieces:
        check_growth(read, piece)
    check_growth(read, "a", head="<|channel|>commentary to=functions.")
    check_growth(read, "a", head="<|channel|>commentary to=functions.x<|channel|>")


EDIT_PIECES = {
    "whole_function": ("```python\n", "```python\ndef f(:\n```\n", "\n", "```\n```\n"),
    "search_replace": ("=======\n", "a.py\n<<<<<<< SEARCH\na\n=======\n", ">>>>>>> REPLACE\n"),
    "udiff": ("+x\n", "-x\n+y\n", "\n", "@@\n", "--- a/x\n+++ b/x\n@@\n-a\n+b\n"),
}
HEADS = {"whole_function": "```python\n", "search_replace": "a.py\n<<<<<<< SEARCH\n"}
HEADS["udiff"] = "--- a/x\n+++ b/x\n@@\n"


@pytest.mark.parametrize("edits", GUIDES)
def test_an_edit_form_reads_every_repeated_line_in_linear_time(edits: str) -> None:
    for piece in EDIT_PIECES[edits]:
        for head in ("", HEADS[edits]):
            check_growth(lambda text: read_edits(text, edits, FULL_TOOLS), piece, head)


def test_long_functions_are_compared_in_less_than_a_second() -> None:
    first, second = ("x = f(a, b)\n" * 2000, "y = f(a, c, d)\n" * 2000)
    assert seconds_of(lambda text: _likeness(text, second), first) < 1
