"""Python code of a made-up package with definitions that can be renamed and moved, and with some that must not be."""

FILES = {
    "src/tablekit/__init__.py": '''"""Tables of text."""

from tablekit.rows import Table, parse_rows
from tablekit import report

__all__ = ["Table", "parse_rows", "report"]
''',
    "src/tablekit/rows.py": '''"""Rows of a table."""

from tablekit.cells import pad_cell, strip_cell


def parse_rows(text, mark=","):
    """Cells of each line. `parse_rows("a,b")` is `[["a", "b"]]`."""
    return [[strip_cell(cell) for cell in line.split(mark)] for line in text.splitlines()]


class Table:
    """Rows with equal columns, read by parse_rows."""

    def __init__(self, text):
        self.rows = parse_rows(text)  # parse_rows splits the lines

    def close(self):
        self.rows = []

    def lines(self, width=4):
        return ["".join(pad_cell(cell, width) for cell in row) for row in self.rows]


def close(table):
    """The closed table."""
    table.close()
    return table
''',
    "src/tablekit/cells.py": '''"""Single cells."""


# spaces at both ends are no content
def strip_cell(cell):
    """A cell without the spaces around it."""
    kept = cell.strip()
    return kept or "-"


def pad_cell(cell, width):
    """A cell of a width."""
    missing = width - len(cell)
    if missing < 0:
        return cell[:width]
    return cell + " " * missing


def find_cell(rows, cell):
    """Row and column of a cell."""
    for number, row in enumerate(rows):
        if cell in row:
            return number, row.index(cell)
    return None
''',
    "src/tablekit/report.py": '''"""Figures of tables."""

from tablekit import rows
from tablekit.cells import (
    find_cell,
    strip_cell,
)


def count_cells(text):
    """Number of cells of a text."""
    return sum(len(row) for row in rows.parse_rows(text))


def has_cell(text, cell):
    """Whether a text has a cell."""
    return find_cell(rows.parse_rows(text), strip_cell(cell)) is not None


def call(name, *arguments):
    """The result of a figure by its name."""
    return {"count_cells": count_cells}[name](*arguments)
''',
    "tests/test_rows.py": """import tablekit
from tablekit.rows import close, parse_rows


def test_rows():
    assert parse_rows("a, b\\nc") == [["a", "b"], ["c"]]
    assert tablekit.parse_rows("a;b", ";") == [["a", "b"]]


def test_table():
    assert tablekit.Table("a,bcdefg").lines() == ["a   bcde"]
    assert close(tablekit.Table("a")).rows == []
""",
    "tests/test_cells.py": """import pytest

from tablekit.cells import find_cell, pad_cell, strip_cell


@pytest.mark.parametrize("cell, kept", [(" a ", "a"), ("", "-"), ("b", "b")])
def test_strip(cell, kept):
    assert strip_cell(cell) == kept


def test_pad():
    assert pad_cell("ab", 4) == "ab  "
    assert pad_cell("abc", 2) == "ab"


def test_find():
    assert find_cell([["a"], ["b", "c"]], "c") == (1, 1)
    assert find_cell([["a"]], "c") is None
""",
    "tests/test_report.py": """from tablekit import report


def test_count():
    assert report.count_cells("a,b\\nc") == 3
    assert report.call("count_cells", "a") == 1


def test_has():
    assert report.has_cell("a,b", " b ")
    assert not report.has_cell("a,b", "c")
""",
}
