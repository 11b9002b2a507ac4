"""Regions: what is shown, what an edit means, and where a line went."""

import ast
import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.agent.regions import (
    RegionError,
    find_symbol,
    name_at,
    open_region,
    show_lines,
)

TEXT = """import os


def f(
    a,
):
    b = a
    return b


class C:
    @property
    def f(self):
        return 1
"""


@given(st.text(alphabet="ab\n ", max_size=40))
def test_a_region_without_edits_is_the_file(text: str) -> None:
    assert open_region(text, "a.py").text() == text


def test_symbols_are_found_whole_with_their_decorators() -> None:
    assert open_region(TEXT, "a.py::f").lines[0] == "def f("
    assert open_region(TEXT, "a.py::f").lines[-1] == "    return b"
    assert open_region(TEXT, "a.py::C.f").lines == (
        "    @property",
        "    def f(self):",
        "        return 1",
    )


def test_symbols_agree_with_the_syntax_tree() -> None:
    source = inspect.getsource(textwrap)
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            assert find_symbol(lines, node.name) == (node.lineno, node.end_lineno)


def test_every_line_of_a_function_has_its_name() -> None:
    for module in (textwrap, inspect):
        source = inspect.getsource(module)
        lines: list[str] = source.splitlines()
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            first, last = find_symbol(lines, node.name)
            written = [line for line in range(first, last + 1) if lines[line - 1].strip()]
            names = {name_at(lines, line).split(".")[0] for line in written}
            assert names == {node.name}


def test_names_are_those_of_the_innermost_function_and_decorators_count() -> None:
    lines = TEXT.splitlines()
    found = [name_at(lines, number) for number in (1, 4, 5, 6, 7, 8, 11, 12, 13, 14)]
    assert found == ["", "f", "f", "f", "f", "f", "C", "C.f", "C.f", "C.f"]


def test_a_second_edit_replaces_the_first() -> None:
    region = open_region(TEXT, "a.py::f").with_edits("<L4>    b = 2\n<L5>    return a")
    assert "b = 2\n    return a\n" in region.text()
    again = region.with_edits("<L5>    return 3")
    assert again.text() == TEXT.replace("return b", "return 3")


def test_lines_are_followed_through_edits_that_grow_and_shrink() -> None:
    region = open_region("a\nb\nc\nd\n", "x:2-3").with_edits("<L1>b1\nb2\n<L2>")
    assert region.text() == "a\nb1\nb2\nd\n"
    assert [region.number_at(line) for line in (1, 2, 3, 4)] == [None, 1, 1, None]


def test_shown_lines_are_numbered_and_limited() -> None:
    view, region = show_lines(open_region("a\nb\nc\n", "x"), 2)
    assert view == "<L1>a\n<L2>b\n1 more lines from x:3"
    assert region.text() == "a\nb\nc\n"
    assert len(region.lines) == 2


@pytest.mark.parametrize("items", ["x = 1", "<L9>x", "<L0>x", "<L1>a<L1>b", "y<L1>x"])
def test_impossible_edits_are_refused(items: str) -> None:
    with pytest.raises(RegionError):
        open_region("a\nb\n", "x").with_edits(items)


@pytest.mark.parametrize("argument", ["x::nothing", "x:7-9", "x:3-2", "x:0"])
def test_impossible_regions_are_refused(argument: str) -> None:
    with pytest.raises(RegionError):
        open_region("a\nb\n", argument)


@pytest.mark.parametrize(
    ("text", "items", "wanted"),
    [
        ("a\r\nb\r\nc\r\n", "<L2>x\ny", "a\r\nx\r\ny\r\nc\r\n"),
        ("a\r\nb\nc\r\n", "<L2>x\ny\n<L3>", "a\r\nx\ny\n"),
        ("a\r\nb", "<L2>x\ny", "a\r\nx\r\ny"),
        ("a\r\nb\r\n", "<L1>x\n", "x\r\nb\r\n"),
        ("a\nb\n", "<L1>x\r", "x\r\nb\n"),
        ("a\x0c\u2028b\rc\nd\n", "<L2>x", "a\x0c\u2028b\rc\nx\n"),
    ],
)
def test_edited_lines_end_as_those_they_replace(text: str, items: str, wanted: str) -> None:
    assert open_region(text, "a.py").with_edits(items).text() == wanted
