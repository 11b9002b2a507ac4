"""Answers left where the agent can read them: removed code, its own names, hidden tests.

A candidate with a leak is not published.

Removed text leaks when three removed lines in a row stand together somewhere. A name leaks when it
was bound only in removed code and occurs in any file, in a comment or in bytecode.
"""

import functools
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.breaking.definitions import read_names
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.hiding import function_names
from ostinato.tasks.records import Problem

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{3,}")
_MIN_NAME = 6
_RUN_LINES = 3
_MIN_RUN_CHARACTERS = 40
# masked in every box (infra/sandbox/box.py): packages of other projects and CPython's own tests
_UNREADABLE = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "test", "idlelib", "turtledemo", "lib2to3"}
)


@dataclass(frozen=True)
class Leak:
    """One answer in reach."""

    what: str
    path: str


@dataclass(frozen=True)
class _FileIndex:
    words: frozenset[bytes]
    runs: frozenset[int]


class LeakCheck:
    """Search for answers in everything that an agent can read of a repository."""

    def __init__(self, repository: PreparedRepository) -> None:
        self._repository = repository

    @functools.cached_property
    def _everything(self) -> dict[str, bytes]:
        """Every file below the repository's directory, caches and bytecode included."""
        directory = self._repository.directory
        return {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    @functools.cached_property
    def _tree(self) -> "ReadableTree":
        return ReadableTree(self._everything)

    @functools.cached_property
    def _names(self) -> "CodeNames":
        return CodeNames(self._everything)

    def leaks(self, candidate: Candidate) -> bool:
        """Whether a candidate's removed code can be read elsewhere."""
        # a mined commit has old code where new code was; single lines are no run of lines
        if candidate.kind is Kind.MINED_COMMIT or not candidate.blocks:
            return False
        return bool(self.find(candidate.draft(self._repository.fingerprint)))

    def find(self, problem: Problem) -> tuple[Leak, ...]:
        """Answers of a problem, its hidden tests among them."""
        return find_leaks(problem, self._repository.files, self._tree, self._names)


class ReadableTree:
    """Words and runs of lines of files, by path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._indexes = {path: _index(content) for path, content in files.items()}
        self._with_word: dict[bytes, set[str]] = {}
        self._with_run: dict[int, set[str]] = {}
        for path, found in self._indexes.items():
            for word in found.words:
                self._with_word.setdefault(word, set()).add(path)
            for run in found.runs:
                self._with_run.setdefault(run, set()).add(path)

    def laid_over(self, changed: Mapping[str, bytes]) -> "LaidOver":
        """This tree with some files changed."""
        return LaidOver(self, {path: _index(content) for path, content in changed.items()})

    def places_of_word(self, word: bytes) -> set[str]:
        """Files that hold a word."""
        return self._with_word.get(word, set())

    def places_of_run(self, run: int) -> set[str]:
        """Files that hold a run of lines."""
        return self._with_run.get(run, set())


class LaidOver:
    """A tree with a few files changed. Asks the tree below for all others."""

    def __init__(self, below: ReadableTree, changed: Mapping[str, _FileIndex]) -> None:
        self._below = below
        self._changed = changed

    def places_of_word(self, word: bytes) -> set[str]:
        """Files that hold a word."""
        own = {path for path, found in self._changed.items() if word in found.words}
        return own | (self._below.places_of_word(word) - self._changed.keys())

    def places_of_run(self, run: int) -> set[str]:
        """Files that hold a run of lines."""
        own = {path for path, found in self._changed.items() if run in found.runs}
        return own | (self._below.places_of_run(run) - self._changed.keys())


class CodeNames:
    """Counts of names in the code of pristine Python files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.counts: dict[str, int] = {}
        for path, content in files.items():
            if path.endswith(".py"):
                for name, _ in read_names(content.decode(errors="replace")):
                    self.counts[name] = self.counts.get(name, 0) + 1


def find_leaks(
    problem: Problem, pristine: Mapping[str, bytes], tree: ReadableTree, names: CodeNames
) -> tuple[Leak, ...]:
    """Answers in reach of an agent.

    `tree`: all it can read before the problem's own changes; `names`: of the pristine files.
    """
    view = tree.laid_over(problem.break_files(pristine))
    leaks: dict[Leak, None] = {}
    for block in problem.blocks:
        for run in _runs(line.encode() for line in block.gold_lines):
            for path in view.places_of_run(run):
                leaks.setdefault(Leak("removed lines", path))
            if run in _library_runs():
                leaks.setdefault(Leak("removed lines", "standard library"))
    for name in sorted(_own_names(problem, names)):
        for path in view.places_of_word(name.encode()):
            leaks.setdefault(Leak(f"name {name}", path))
    for name in sorted(function_names(problem.hidden_tests)):
        if names.counts.get(name, 0) == 1:  # others of that name may stay
            for path in view.places_of_word(name.encode()):
                leaks.setdefault(Leak(f"hidden test {name}", path))
    return tuple(sorted(leaks, key=lambda leak: (leak.what, leak.path)))


def _own_names(problem: Problem, names: CodeNames) -> set[str]:
    """Names bound in removed code and used nowhere else, the problem's own symbol left out."""
    removed: dict[str, int] = {}
    bound: set[str] = set()
    for block in problem.blocks:
        text = "\n".join(block.gold_lines)
        for name, _ in read_names(_unindent(block.gold_lines)):
            removed[name] = removed.get(name, 0) + 1
        bound |= set(re.findall(r"(?:def|class)\s+(\w+)", text))
        bound |= set(re.findall(r"^\s*(\w+)\s*(?::[^=]+)?=[^=]", text, re.MULTILINE))
    spoken = set(problem.symbol.split("."))
    return {
        name
        for name in bound - spoken
        if len(name) >= _MIN_NAME
        and not name.startswith("__")
        and removed.get(name, 0) >= names.counts.get(name, 0)
    }


def _unindent(lines: Sequence[str]) -> str:
    """Text that the tokenizer takes: it refuses lines that come back to an unknown margin."""
    return "\n".join(line.lstrip() for line in lines)


@functools.lru_cache(maxsize=256)
def _index(content: bytes) -> _FileIndex:
    return _FileIndex(
        words=frozenset(_WORD.findall(content)), runs=frozenset(_runs(content.split(b"\n")))
    )


def _runs(lines: Iterable[bytes]) -> list[int]:
    """Hashes of every three lines in a row, blank lines and white space left out."""
    kept = [b"".join(line.split()) for line in lines]
    kept = [line for line in kept if line]
    return [
        hash(tuple(kept[start : start + _RUN_LINES]))
        for start in range(len(kept) - _RUN_LINES + 1)
        if sum(map(len, kept[start : start + _RUN_LINES])) >= _MIN_RUN_CHARACTERS
    ]


@functools.cache
def _library_runs() -> frozenset[int]:
    """Runs of the interpreter's own library, as far as a box shows it."""
    root = Path(sysconfig.get_path("stdlib"))
    runs: set[int] = set()
    for path in sorted(root.rglob("*.py")):
        if not _UNREADABLE.intersection(path.relative_to(root).parts):
            runs.update(_runs(path.read_bytes().split(b"\n")))
    return frozenset(runs)
