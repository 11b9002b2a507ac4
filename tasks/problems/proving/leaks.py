"""Leaks: answers that the agent can read. They are removed code and its own names, hidden tests, changed lines.

Removed code leaks if three consecutive removed lines occur together elsewhere. A name leaks if it was bound only in
removed code and occurs in any file, even in a comment or in bytecode. A large deletion leaks if a fifth of its lines or
names do, since code of that size shares some with its neighbours. A changed line leaks if it occurs in a comment,
in a string, with both its neighbours in another file, in the prompt, or in an object of git. The build of problems and
their certificate run the same checks.
"""

import ast
import functools
import io
import os
import re
import sysconfig
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.git import run_git
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.inside.sources import function_of
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.candidates import LARGE_DELETIONS
from ostinato.tasks.problems.breaking.definitions import read_names
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.records import Problem

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{3,}")
_MIN_NAME = 6
LEAST_CHARACTERS = 8  # shorter lines (without white space) reveal no answer
_LEAST_RUN_CHARACTERS = 40
_MAX_HISTORY_BYTES = 64 << 20
_MAX_TEXT_BYTES = 1 << 20
_RUN_LINES = 3
_MAX_SHOWN_RATIO = 0.2  # of the parts of a large deletion
_MIN_RUN_CHARACTERS = 40
# folders masked in every box (infra/sandbox/box.py): packages of other projects and CPython's own tests
_UNREADABLE = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "test", "idlelib", "turtledemo", "lib2to3"}
)


class Leak(NamedTuple):
    """One answer that the agent can read."""

    what: str
    path: str


class LeakCheck:
    """Searches of one repository for answers that an agent can read. Files are read once."""

    def __init__(self, repository: PreparedRepository) -> None:
        self._repository = repository
        self._pristine = repository.files

    @functools.cached_property
    def _everything(self) -> Mapping[str, bytes]:
        """Every file below the repository, caches and bytecode included."""
        directory = self._repository.directory
        return {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }

    @functools.cached_property
    def _places(self) -> Mapping[bytes | int, set[str]]:
        """Paths of files by the words and runs of lines that they contain."""
        places: dict[bytes | int, set[str]] = defaultdict(set)
        for path, content in self._everything.items():
            for mark in _index(content):
                places[mark].add(path)
        return places

    @functools.cached_property
    def _name_counts(self) -> Counter[str]:
        """Numbers of occurrences of names in the code of Python files."""
        return Counter(
            name
            for path, content in self._everything.items()
            if path.endswith(".py")
            for name, _ in read_names(content.decode(errors="replace"))
        )

    @functools.cached_property
    def _quoted(self) -> dict[str, bytes]:
        return {path: _quoted_in(text) for path, text in self._pristine.items()}

    @functools.cached_property
    def _squeezed(self) -> dict[str, bytes]:
        return {path: squeeze(text) for path, text in self._pristine.items()}

    @functools.cached_property
    def _history(self) -> frozenset[bytes]:
        return frozenset(_history_of(self._repository.directory))

    def find(self, problem: Problem) -> tuple[Leak, ...]:
        """Removed code of a problem, its own names and its hidden tests, in files of the broken state."""
        # old code of a commit repeats parts of the new code; edits of single lines contain no run of lines; a refactoring
        # has no secret, since its prompt names the new place and the code stays
        is_old_code = problem.kind in (Kind.MINED_COMMIT, Kind.GIVEN, Kind.REFACTORING)
        if is_old_code or not (problem.blocks or problem.hidden_tests):
            return ()
        changed = problem.break_files(self._pristine)
        indexes = {path: _index(content) for path, content in changed.items()}

        def places_of(mark: bytes | int) -> set[str]:
            own = {path for path, marks in indexes.items() if mark in marks}
            return own | (self._places.get(mark, set()) - changed.keys())

        shown: list[set[Leak]] = []
        for block in problem.blocks:
            for run in _runs(line.encode() for line in block.gold_lines):
                shown.append({Leak("removed lines", path) for path in places_of(run)})
                if run in _library_runs():
                    shown[-1].add(Leak("removed lines", "standard library"))
        named = [
            {Leak(f"name {name}", path) for path in places_of(name.encode())}
            for name in sorted(_own_names(problem, self._name_counts))
        ]
        most = _MAX_SHOWN_RATIO if problem.operator in LARGE_DELETIONS else 0.0
        leaks = _join_if_many(shown, most) | _join_if_many(named, most)
        hidden = {function_of(test).rpartition("::")[2] for test in problem.hidden_tests}
        for name in hidden:
            if self._name_counts[name] == 1:  # otherwise another test of that name may be found
                leaks |= {Leak(f"hidden test {name}", path) for path in places_of(name.encode())}
        return tuple(sorted(leaks))

    def find_repeated(self, problem: Problem) -> Iterator[Leak]:
        """Changed lines that occur in their right form in a comment or string of the broken state, or with both
        neighbours in another file.
        """
        broken = problem.break_files(self._pristine)
        for edit in problem.edits:
            yield from self._find_line(broken, edit.path, edit.line_number)

    def _find_line(self, broken: Mapping[str, bytes], path: str, number: int) -> Iterator[Leak]:
        lines = self._pristine[path].decode().split("\n")
        with_neighbours = "\n".join(lines[max(0, number - 2) : number + 1])
        line, run = squeeze(lines[number - 1].encode()), squeeze(with_neighbours.encode())
        for other in self._pristine:
            now = broken.get(other)
            quoted = self._quoted[other] if now is None else _quoted_in(now)
            text = self._squeezed[other] if now is None else squeeze(now)
            if len(line) >= LEAST_CHARACTERS and line in quoted:
                yield Leak(f"line {number} of {path} in a comment or text", other)
            elif other != path and len(run) >= _LEAST_RUN_CHARACTERS and run in text:
                yield Leak(f"line {number} of {path} with its neighbours", other)

    def find_in_prompt(self, problem: Problem) -> Iterator[Leak]:
        """Changed or removed lines that occur in the prompt."""
        prompt = squeeze(problem.prompt.encode())
        shown = [(f"line {edit.line_number}", edit.path, edit.gold_text) for edit in problem.edits]
        shown += [("removed lines", one.path, "\n".join(one.gold_lines)) for one in problem.blocks]
        for what, path, text in shown:
            squeezed = squeeze(text.encode())
            if len(squeezed) >= LEAST_CHARACTERS and squeezed in prompt:
                yield Leak(what, path)

    def find_in_history(self, problem: Problem) -> Iterator[Leak]:
        """Files in their state before the problem broke them that occur in objects of git."""
        for path in sorted(problem.break_files(self._pristine)):
            is_product = self._repository.is_editable(path) and path in self._pristine
            if is_product and self._squeezed[path] in self._history:
                yield Leak("file as it was", path)


def _join_if_many(found: Sequence[set[Leak]], most: float) -> set[Leak]:
    """All leaks of some parts of an answer, if more than the share `most` of the parts has any."""
    num_shown = sum(map(bool, found))
    return set().union(*found) if num_shown > most * len(found) else set()


def _own_names(problem: Problem, counts: Mapping[str, int]) -> set[str]:
    """Names that are bound in removed code and used nowhere else, without the problem's own symbol."""
    removed: Counter[str] = Counter()
    bound: set[str] = set()
    for block in problem.blocks:
        text = "\n".join(block.gold_lines)
        # the tokenizer refuses lines that return to an unknown indentation
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
    """Words of a file, and hashes of its runs of lines."""
    return frozenset((*_WORD.findall(content), *_runs(content.split(b"\n"))))


def _runs(lines: Iterable[bytes]) -> list[int]:
    """Hashes of every three consecutive lines, without blank lines and white space."""
    kept = [line for line in (b"".join(line.split()) for line in lines) if line]
    runs = (kept[start : start + _RUN_LINES] for start in range(len(kept) - _RUN_LINES + 1))
    return [hash(tuple(run)) for run in runs if sum(map(len, run)) >= _MIN_RUN_CHARACTERS]


@functools.cache
def _library_runs() -> frozenset[int]:
    """Runs of lines in the part of the standard library that a box shows."""
    root = Path(sysconfig.get_path("stdlib"))
    runs: set[int] = set()
    for path in sorted(root.rglob("*.py")):
        if not _UNREADABLE.intersection(path.relative_to(root).parts):
            runs.update(_runs(path.read_bytes().split(b"\n")))
    return frozenset(runs)


def squeeze(text: bytes) -> bytes:
    """The text without white space."""
    return b"".join(text.split())


@functools.lru_cache(maxsize=256)
def _quoted_in(content: bytes) -> bytes:
    """Comments and strings of a Python file, joined by zero bytes, or the whole content of any other file,
    without white space.
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


def _history_of(directory: Path) -> Iterable[bytes]:
    """Contents of all file objects of git below a folder, without white space.

    The objects are read from a new repository, so that the configuration of the original one is not used.
    """
    for place in sorted(directory.rglob(".git")):
        if not (place / "objects").is_dir() or place.is_symlink():
            continue
        with tempfile.TemporaryDirectory(prefix="ostinato-history-") as scratch:
            bare = Path(scratch) / "bare"
            run_git(None, "init", "--quiet", "--bare", str(bare))
            _link_objects(place / "objects", bare / "objects")
            listed = run_git(bare, "cat-file", "--batch-all-objects", "--batch-check").decode()
            blobs = [line.split() for line in listed.splitlines() if line.split()[1] == "blob"]
            texts = [(name, int(size)) for name, _, size in blobs if int(size) <= _MAX_TEXT_BYTES]
            total = sum(size for _, size in texts)
            if total > _MAX_HISTORY_BYTES:
                raise ProblemError(
                    f"{place} holds {total} bytes of files, wanted at most {_MAX_HISTORY_BYTES} "
                    "for the search for answers; remove it from the repository"
                )
            for name, _ in texts:
                yield squeeze(run_git(bare, "cat-file", "blob", name, max_bytes=_MAX_TEXT_BYTES))


def _link_objects(source: Path, target: Path) -> None:
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(source)
            # files in `info` may list object folders elsewhere, which git would follow
            if relative.parts[0] != "info" and path.is_file() and not path.is_symlink():
                place = target / relative
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
