"""Answers of a problem in its prompt, in files that an agent reads and in objects of git.

Removed code is looked for as the problem stage does (problems/proving/leaks.py). A changed line
leaks when it stands in a comment or a text of another file, or with both its neighbours anywhere.
"""

import ast
import functools
import io
import os
import re
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.git import run_git
from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.certification.records import Finding, Reason
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.records import Problem

_LEAST_CHARACTERS = 8  # of a line without white space that gives an answer away
_LEAST_RUN_CHARACTERS = 40
_LEAST_ANSWER = 6  # shorter ones stand in files by chance
_MOST_HISTORY_BYTES = 64 << 20
_MOST_TEXT_BYTES = 1 << 20


class LeakScan:
    """Searches of one repository, whose files are read once."""

    def __init__(self, repository: PreparedRepository) -> None:
        self._repository = repository

    @functools.cached_property
    def _check(self) -> LeakCheck:
        return LeakCheck.of(self._repository)

    @functools.cached_property
    def _said(self) -> dict[str, list[bytes]]:
        return {path: _said_in(text) for path, text in self._repository.files.items()}

    @functools.cached_property
    def _squeezed(self) -> dict[str, bytes]:
        return {path: _squeeze(text) for path, text in self._repository.files.items()}

    @functools.cached_property
    def _history(self) -> frozenset[bytes]:
        return frozenset(_history_of(self._repository.directory))

    def find(self, problem: Problem) -> list[Finding]:
        """Places where an agent can read the answer."""
        return list(self._find(problem))

    def _find(self, problem: Problem) -> Iterator[Finding]:
        pristine = self._repository.files
        broken = problem.break_files(pristine)
        for edit in problem.edits:
            line = _squeeze(edit.gold_text.encode())
            if len(line) >= _LEAST_CHARACTERS and line in _squeeze(problem.prompt.encode()):
                yield Finding(
                    reason=Reason.LEAK_PROMPT, detail=f"line {edit.line_number} of {edit.path}"
                )
            yield from self._find_line(broken, edit.path, edit.line_number)
        for block in problem.blocks:
            text = _squeeze("\n".join(block.gold_lines).encode())
            if len(text) >= _LEAST_CHARACTERS and text in _squeeze(problem.prompt.encode()):
                yield Finding(reason=Reason.LEAK_PROMPT, detail=f"removed lines of {block.path}")
        if problem.kind not in (Kind.MINED_COMMIT, Kind.GIVEN):
            for leak in self._check.find(problem):
                yield Finding(reason=Reason.LEAK_FILE, detail=f"{leak.what} in {leak.path}")
        for path in {path for path in broken if self._repository.is_editable(path)}:
            if path in pristine and _squeeze(pristine[path]) in self._history:
                yield Finding(reason=Reason.LEAK_HISTORY, detail=f"{path} as it was, in .git")

    def _find_line(self, broken: Mapping[str, bytes], path: str, number: int) -> Iterator[Finding]:
        lines = self._repository.files[path].decode().split("\n")
        line, run = _squeeze(lines[number - 1].encode()), _squeeze(_around(lines, number))
        for other in self._repository.files:
            now = broken.get(other)
            said = self._said[other] if now is None else _said_in(now)
            text = self._squeezed[other] if now is None else _squeeze(now)
            if len(line) >= _LEAST_CHARACTERS and any(line in part for part in said):
                detail = f"line {number} of {path} in a comment or text of {other}"
                yield Finding(reason=Reason.LEAK_FILE, detail=detail)
            elif other != path and len(run) >= _LEAST_RUN_CHARACTERS and run in text:
                detail = f"line {number} of {path} with its neighbours in {other}"
                yield Finding(reason=Reason.LEAK_FILE, detail=detail)


def _around(lines: list[str], number: int) -> bytes:
    return "\n".join(lines[max(0, number - 2) : number + 1]).encode()


def _squeeze(text: bytes) -> bytes:
    return b"".join(text.split())


def _said_in(content: bytes) -> list[bytes]:
    """Comments and texts of a Python file, the whole of another, without white space."""
    try:
        tree = parse_python(content)
        tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return [_squeeze(content)]
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    found += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [_squeeze(text.encode(errors="replace")) for text in found]


def find_answers(
    problem: Problem, answers: Mapping[str, bytes], repository: PreparedRepository
) -> Iterator[Finding]:
    """Contents of a solution's files in what an agent of an environment gets."""
    given = {path: text.encode() for path, text in problem.given_files.items()}
    files = {**repository.files, **given}
    for path, content in answers.items():
        answer = content.decode(errors="replace").strip()
        if answer and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", problem.prompt):
            yield Finding(reason=Reason.LEAK_PROMPT, detail=f"content of {path}")
        if len(answer) >= _LEAST_ANSWER:
            for other in sorted(name for name, text in files.items() if answer.encode() in text):
                yield Finding(reason=Reason.LEAK_FILE, detail=f"content of {path} in {other}")


def _history_of(directory: Path) -> Iterable[bytes]:
    """Contents of all file objects of git below a folder, without white space.

    The objects are read from a repository of ours: nothing of the other's configuration is used.
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
            texts = [(name, int(size)) for name, _, size in blobs if int(size) <= _MOST_TEXT_BYTES]
            total = sum(size for _, size in texts)
            if total > _MOST_HISTORY_BYTES:
                raise ProblemError(
                    f"{place} holds {total} bytes of files, wanted at most {_MOST_HISTORY_BYTES} "
                    "to look for answers in; remove it from the repository"
                )
            for name, _ in texts:
                yield _squeeze(run_git(bare, "cat-file", "blob", name, max_bytes=_MOST_TEXT_BYTES))


def _link_objects(source: Path, target: Path) -> None:
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(source)
            # a list of other places would be followed out of the folder
            if relative.parts[0] != "info" and path.is_file() and not path.is_symlink():
                place = target / relative
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
