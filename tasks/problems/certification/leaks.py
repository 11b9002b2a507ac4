"""Answers of a problem in its prompt, in files that an agent reads and in objects of git.

Removed code and changed lines are looked for as the problem stage does (problems/proving/leaks.py,
problems/proving/repeated_lines.py).
"""

import functools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.git import run_git
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.certification.records import Finding, Reason
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.problems.proving.repeated_lines import (
    LEAST_CHARACTERS,
    RepeatedLines,
    squeeze,
)
from ostinato.tasks.records import Problem

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
    def _repeated(self) -> RepeatedLines:
        return RepeatedLines(self._repository)

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
            line = squeeze(edit.gold_text.encode())
            if len(line) >= LEAST_CHARACTERS and line in squeeze(problem.prompt.encode()):
                yield Finding(
                    reason=Reason.LEAK_PROMPT, detail=f"line {edit.line_number} of {edit.path}"
                )
        for block in problem.blocks:
            text = squeeze("\n".join(block.gold_lines).encode())
            if len(text) >= LEAST_CHARACTERS and text in squeeze(problem.prompt.encode()):
                yield Finding(reason=Reason.LEAK_PROMPT, detail=f"removed lines of {block.path}")
        leaks = list(self._repeated.find(problem))
        if problem.kind not in (Kind.MINED_COMMIT, Kind.GIVEN):
            leaks += self._check.find(problem)
        for leak in leaks:
            yield Finding(reason=Reason.LEAK_FILE, detail=f"{leak.what} in {leak.path}")
        for path in {path for path in broken if self._repository.is_editable(path)}:
            if path in pristine and squeeze(pristine[path]) in self._history:
                yield Finding(reason=Reason.LEAK_HISTORY, detail=f"{path} as it was, in .git")


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
                yield squeeze(run_git(bare, "cat-file", "blob", name, max_bytes=_MOST_TEXT_BYTES))


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
