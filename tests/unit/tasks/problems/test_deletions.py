"""Deleted code is gone with its exports and imports, and what stays is Python."""

import ast

from ostinato.tasks.problems.breaking.definitions import (
    NameGraph,
    find_definitions,
    read_definitions,
)
from ostinato.tasks.problems.breaking.deletions import DeletionMaker
from ostinato.tasks.problems.config import Kind

CORE = '''"""Core."""

import re
import os.path
from math import ceil, floor

__all__ = [
    "shout",
    "whisper",
]


def shout(text):
    """Text in capitals."""
    # louder
    loud = _upper(text)
    return _mark(loud)


def _upper(text):
    parts = re.split(" ", text)
    return " ".join(part.upper() for part in parts)


def _mark(text):
    number = ceil(len(text) / 10)
    marks = "!" * number
    return text + marks


def whisper(text):
    low = text.lower()
    return low + "." * floor(1.5)
'''
INIT = "from kit.core import shout, whisper\n\n__all__ = ['shout', 'whisper']\n"
FILES = {"kit/__init__.py": INIT.encode(), "kit/core.py": CORE.encode()}
DEFINITIONS = {path: find_definitions(path, text.decode()) for path, text in FILES.items()}


def make(tests):
    return DeletionMaker("kit", FILES, DEFINITIONS, {"tests/test_kit.py": tests.encode()})


def broken(candidate):
    return {path: text.decode() for path, text in candidate.broken_files(FILES).items()}


def test_levels_leave_what_they_say():
    made = list(make("import kit\n\n\ndef test():\n    kit.shout('a')\n").functions())
    mine = {item.operator: broken(item)["kit/core.py"] for item in made if item.symbol == "whisper"}
    assert "def whisper(text):\n    raise NotImplementedError" in mine["body"]
    assert "whisper" not in mine["everything"]
    assert "floor" not in mine["everything"]  # only it used that import
    assert "import os.path" in mine["everything"]  # unused before, so no trace of it
    shout = {item.operator: broken(item)["kit/core.py"] for item in made if item.symbol == "shout"}
    assert '"""Text in capitals."""\n    raise' in shout["body"]
    assert "Text in capitals" not in shout["signature"]


def test_feature_takes_helpers_exports_and_imports_along():
    made = make("import kit\n\n\ndef test():\n    kit.shout('a')\n").features()
    (feature,) = [item for item in made if item.symbol == "shout"]
    assert (feature.kind, feature.operator) == (Kind.DELETED_FEATURE, "whole")
    files = broken(feature)
    for text in files.values():
        ast.parse(text)
        for name in ("shout", "_upper", "_mark", "re", "ceil"):
            assert name not in {node.id for node in ast.walk(ast.parse(text)) if is_name(node)}
            assert f"'{name}'" not in text
            assert f'"{name}"' not in text
    assert "import re" not in files["kit/core.py"]
    assert "from kit.core import whisper" in files["kit/__init__.py"]


def is_name(node):
    return isinstance(node, ast.Name)


def test_symbol_that_tests_import_stays_as_a_stub():
    made = make("from kit.core import shout\n").features()
    (feature,) = [item for item in made if item.symbol == "shout"]
    text = broken(feature)["kit/core.py"]
    assert feature.operator == "stub"
    assert "def shout(text):" in text
    assert "_upper" not in text
    assert not any(
        item.operator == "everything" and item.symbol == "shout"
        for item in make("from kit.core import shout\n").functions()
    )


def test_shared_helpers_stay():
    graph = NameGraph(FILES, DEFINITIONS)
    by_name = {item.name: item for item in DEFINITIONS["kit/core.py"]}
    assert {item.name for item in graph.helpers_of([by_name["shout"]], frozenset())} == {
        "shout", "_upper", "_mark",
    }  # fmt: skip
    spoken = frozenset({"_mark"})
    assert {item.name for item in graph.helpers_of([by_name["shout"]], spoken)} == {
        "shout", "_upper",
    }  # fmt: skip


def test_files_that_no_parser_takes_are_left_out():
    """Packages that read Python ship test data that is none. Of a line that ends with a carriage return alone the
    parser's number is not that of an edit.
    """
    bad = {"kit/tabs.py": b"if True:\n        a = 1\n\tb = 2\n", "kit/old.py": b"# \xe9\n"}
    files = {**FILES, **bad, "kit/zero.py": b"a = '\x00'\n"}
    files["kit/mac.py"] = b"def f(a):\r    return a\r"
    files["kit/part.py"] = b"X = 1\rdef f(a):\n    return a\n"
    assert set(read_definitions(files)) == set(FILES)

    tests = "from kit.core import shout\n"
    made = DeletionMaker("kit", FILES, DEFINITIONS, {"tests/a.py": tests.encode(), **bad})
    assert [item.candidate_id for item in made.features()] == [
        item.candidate_id for item in make(tests).features()
    ]
