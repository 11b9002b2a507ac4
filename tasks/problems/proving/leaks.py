"""Answers left where the agent can read them: removed code, its own names, hidden tests.

Removed text leaks when three removed lines in a row stand together somewhere. A name leaks when it
was bound only in removed code and occurs in any file, in a comment or in bytecode.
"""

import functools
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

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


class Leak(NamedTuple):
    """One answer in reach."""

    what: str
    path: str


class LeakCheck:
    """Search for answers in everything that an agent can read of a repository."""

    def __init__(
        self, pristine: Mapping[str, bytes], read_everything: Callable[[], Mapping[str, bytes]]
    ) -> None:
        self._pristine = pristine
        self._read_everything = read_everything

    @classmethod
    def of(cls, repository: PreparedRepository) -> "LeakCheck":
        """The check of a repository with every file below it, caches and bytecode included."""
        return cls(repository.files, lambda: _read_below(repository.directory))

    @functools.cached_property
    def _everything(self) -> Mapping[str, bytes]:
        return self._read_everything()

    @functools.cached_property
    def _places(self) -> Mapping[bytes | int, set[str]]:
        """Paths by the words and runs of lines in their files."""
        places: dict[bytes | int, set[str]] = defaultdict(set)
        for path, content in self._everything.items():
            for mark in _index(content):
                places[mark].add(path)
        return places

    @functools.cached_property
    def _name_counts(self) -> Counter[str]:
        """Names in the code of Python files."""
        return Counter(
            name
            for path, content in self._everything.items()
            if path.endswith(".py")
            for name, _ in read_names(content.decode(errors="replace"))
        )

    def leaks(self, candidate: Candidate) -> bool:
        """Whether a candidate's removed code can be read elsewhere."""
        # these have old code where new code was; single lines are no run of lines
        if candidate.kind in (Kind.MINED_COMMIT, Kind.GIVEN) or not candidate.blocks:
            return False
        return bool(self.find(candidate.draft("")))

    def find(self, problem: Problem) -> tuple[Leak, ...]:
        """Answers of a problem in reach of an agent, its hidden tests among them."""
        changed = problem.break_files(self._pristine)
        indexes = {path: _index(content) for path, content in changed.items()}

        def places_of(mark: bytes | int) -> set[str]:
            own = {path for path, marks in indexes.items() if mark in marks}
            return own | (self._places.get(mark, set()) - changed.keys())

        leaks: set[Leak] = set()
        for block in problem.blocks:
            for run in _runs(line.encode() for line in block.gold_lines):
                leaks |= {Leak("removed lines", path) for path in places_of(run)}
                if run in _library_runs():
                    leaks.add(Leak("removed lines", "standard library"))
        for name in _own_names(problem, self._name_counts):
            leaks |= {Leak(f"name {name}", path) for path in places_of(name.encode())}
        for name in function_names(problem.hidden_tests):
            if self._name_counts[name] == 1:  # others of that name may stay
                leaks |= {Leak(f"hidden test {name}", path) for path in places_of(name.encode())}
        return tuple(sorted(leaks))


def _read_below(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _own_names(problem: Problem, counts: Mapping[str, int]) -> set[str]:
    """Names bound in removed code and used nowhere else, the problem's own symbol left out."""
    removed: Counter[str] = Counter()
    bound: set[str] = set()
    for block in problem.blocks:
        text = "\n".join(block.gold_lines)
        # the tokenizer refuses lines that come back to an unknown margin
        unindented = "\n".join(line.lstrip() for line in block.gold_lines)
        removed.update(name for name, _ in read_names(unindented))
        bound |= set(re.findall(r"(?:def|class)\s+(\w+)", text))
        bound |= set(re.findall(r"^\s*(\w+)\s*(?::[^=]+)?=[^=]", text, re.MULTILINE))
    return {
        name
        for name in bound - set(problem.symbol.split("."))
        if len(name) >= _MIN_NAME
        and not name.startswith("__")
        and removed[name] >= counts.get(name, 0)
    }


@functools.lru_cache(maxsize=256)
def _index(content: bytes) -> frozenset[bytes | int]:
    """Words, and hashes of runs of lines."""
    return frozenset((*_WORD.findall(content), *_runs(content.split(b"\n"))))


def _runs(lines: Iterable[bytes]) -> list[int]:
    """Hashes of every three lines in a row, blank lines and white space left out."""
    kept = [line for line in (b"".join(line.split()) for line in lines) if line]
    runs = (kept[start : start + _RUN_LINES] for start in range(len(kept) - _RUN_LINES + 1))
    return [hash(tuple(run)) for run in runs if sum(map(len, run)) >= _MIN_RUN_CHARACTERS]


@functools.cache
def _library_runs() -> frozenset[int]:
    """Runs of the interpreter's own library, as far as a box shows it."""
    root = Path(sysconfig.get_path("stdlib"))
    runs: set[int] = set()
    for path in sorted(root.rglob("*.py")):
        if not _UNREADABLE.intersection(path.relative_to(root).parts):
            runs.update(_runs(path.read_bytes().split(b"\n")))
    return frozenset(runs)
