"""Which languages are cut along their syntax, and how.

The registry: suffix -> `Language`. A language is a grammar and the node types that make a chunk.
Files of any other suffix are cut into windows (infra/agent/search/chunks.py). A new language is one
wheel with its grammar and one entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

import tree_sitter
import tree_sitter_python


@dataclass(frozen=True)
class Language:
    """Syntax of one language as far as chunks need it."""

    name: str
    grammar: Callable[[], object]
    functions: frozenset[str]
    """Node types that make one chunk, nested ones included."""
    classes: frozenset[str]
    """Node types that make a chunk of what is not in a function of theirs."""
    wrappers: frozenset[str]
    """Node types around a definition that belong to it (decorators)."""
    name_field: str = "name"

    def parse(self, source: bytes) -> tree_sitter.Tree:
        """The syntax tree. Broken code gives a tree with error nodes, never an exception."""
        return _parser(self.grammar).parse(source)


@cache
def _parser(grammar: Callable[[], object]) -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(grammar()))


PYTHON = Language(
    name="python",
    grammar=tree_sitter_python.language,
    functions=frozenset({"function_definition"}),
    classes=frozenset({"class_definition"}),
    wrappers=frozenset({"decorated_definition"}),
)
LANGUAGES: dict[str, Language] = {".py": PYTHON, ".pyi": PYTHON}


def language_of(path: str) -> Language | None:
    """The language of a file by its name. None: cut into windows."""
    return LANGUAGES.get(PurePosixPath(path).suffix)
