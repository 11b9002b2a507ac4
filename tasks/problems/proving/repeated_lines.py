"""Changed lines whose right text stands elsewhere in the repository: in a comment, in a text, or with both its
neighbours in another file.
"""

import ast
import functools
import io
import tokenize
from collections.abc import Iterator, Mapping

from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.proving.leaks import Leak
from ostinato.tasks.records import Problem

LEAST_CHARACTERS = 8  # of a line without white space that gives an answer away
_LEAST_RUN_CHARACTERS = 40


class RepeatedLines:
    """Search for changed lines in one repository, whose files are read once."""

    def __init__(self, repository: PreparedRepository) -> None:
        self._files = repository.files

    @functools.cached_property
    def _said(self) -> dict[str, bytes]:
        return {path: _said_in(text) for path, text in self._files.items()}

    @functools.cached_property
    def _squeezed(self) -> dict[str, bytes]:
        return {path: squeeze(text) for path, text in self._files.items()}

    def find(self, problem: Problem) -> Iterator[Leak]:
        """Places where a right line of a problem can be read, in the broken state."""
        broken = problem.break_files(self._files)
        for edit in problem.edits:
            yield from self._find_line(broken, edit.path, edit.line_number)

    def _find_line(self, broken: Mapping[str, bytes], path: str, number: int) -> Iterator[Leak]:
        lines = self._files[path].decode().split("\n")
        line, run = squeeze(lines[number - 1].encode()), squeeze(_around(lines, number))
        for other in self._files:
            now = broken.get(other)
            said = self._said[other] if now is None else _said_in(now)
            text = self._squeezed[other] if now is None else squeeze(now)
            if len(line) >= LEAST_CHARACTERS and line in said:
                yield Leak(f"line {number} of {path} in a comment or text", other)
            elif other != path and len(run) >= _LEAST_RUN_CHARACTERS and run in text:
                yield Leak(f"line {number} of {path} with its neighbours", other)


def squeeze(text: bytes) -> bytes:
    """A text without white space."""
    return b"".join(text.split())


def _around(lines: list[str], number: int) -> bytes:
    return "\n".join(lines[max(0, number - 2) : number + 1]).encode()


@functools.lru_cache(maxsize=256)
def _said_in(content: bytes) -> bytes:
    """Comments and strings of a Python file, joined by zero bytes, or the whole of another file.
    Without white space.
    """
    try:
        tree = parse_python(content)
        tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return squeeze(content)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    found += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return b"\0".join(squeeze(text.encode(errors="replace")) for text in found)
