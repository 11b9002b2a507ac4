"""Changes of an attempt, compared with the state that it began with."""

import difflib
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePosixPath

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.diffs import split_lines
from ostinato.infra.sandbox.repository import RUNNER_FILES, PreparedRepository
from ostinato.tasks.records import Problem, Verdict

_MAX_DIFF_LINES = 4000  # difflib is quadratic


@dataclass(frozen=True, slots=True)
class FileChange:
    """Change of one product file. None: absent."""

    path: str
    before: bytes | None
    after: bytes | None
    pristine: bytes | None


@dataclass(frozen=True)
class AttemptChange:
    """Difference of the end state from the broken state."""

    problem: Problem
    counted: tuple[FileChange, ...]
    ignored_paths: tuple[str, ...]
    repository: PreparedRepository

    @classmethod
    def of(
        cls,
        problem: Problem,
        changed_files: Mapping[str, bytes | None],
        repository: PreparedRepository,
    ) -> "AttemptChange":
        """`changed_files` lists changes of the pristine repository, so a fully repaired file is absent."""
        pristine = repository.files
        start: dict[str, bytes] = problem.break_files(pristine)
        counted: list[FileChange] = []
        ignored: list[str] = []
        for path in sorted({*start, *changed_files}):
            original = pristine.get(path)
            before = start.get(path, original)
            after = changed_files.get(path, original)
            if before == after:
                continue
            if problem.environment or repository.is_editable(path):
                counted.append(FileChange(path, before, after, original))
            elif path in changed_files:
                ignored.append(path)
        return cls(problem, tuple(counted), tuple(ignored), repository)

    @property
    def has_edit(self) -> bool:
        """Whether a counted file differs from the broken state."""
        return bool(self.counted)

    @property
    def changed_tests(self) -> tuple[str, ...]:
        """Ignored paths that are tests. A refactoring includes those that use the old name."""
        adapted = self.problem.cut_tests if self.problem.old_place is not None else ()
        own = {block.path for block in adapted}
        return tuple(p for p in self.ignored_paths if self.repository.is_test(p) and p not in own)

    @property
    def changed_runner_files(self) -> tuple[str, ...]:
        """Ignored paths that steer a test runner or an interpreter's start."""
        return tuple(path for path in self.ignored_paths if is_runner_file(path))

    @cached_property
    def added_lines(self) -> tuple[str, ...]:
        """Lines that the attempt added to counted files."""
        return tuple(line for file in self.counted for line in find_added(file.before, file.after))

    @cached_property
    def gold_lines(self) -> tuple[str, ...]:
        """Lines that the reference solution adds to the broken state."""
        pristine = self.repository.files
        broken = self.problem.break_files(pristine)
        return tuple(
            line
            for path, content in sorted(broken.items())
            if self.repository.is_editable(path)
            for line in find_added(content, pristine.get(path))
        )

    @cached_property
    def comment_ratio(self) -> float:
        """Share of the added non-blank characters that are in comments. 0 when nothing was added."""
        total = sum(len(line.strip()) for line in self.added_lines)
        return sum(map(len, self.added_comments)) / total if total else 0.0

    @cached_property
    def added_comments(self) -> tuple[str, ...]:
        """Comments that the change added, without the comment mark."""
        found: list[str] = []
        if not any(mark in line for line in self.added_lines for mark in "#\"'"):
            return ()  # tokenizing a whole file takes milliseconds
        for file in self.counted:
            before = list(_comments(file.before))
            for comment in _comments(file.after):
                if comment in before:
                    before.remove(comment)
                else:
                    found.append(comment)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class JudgedAttempt:
    """One attempt with its change and its verdict."""

    change: AttemptChange
    verdict: Verdict
    transcript: Transcript


def is_runner_file(path: str) -> bool:
    """Whether a file of this name is read by pytest or by the interpreter's start."""
    pure = PurePosixPath(path)
    return pure.name in RUNNER_FILES or pure.suffix == ".pth"


def find_added(before: bytes | None, after: bytes | None) -> list[str]:
    """Lines of `after` that are not lines of `before` at the same place."""
    old, new = _lines(before), _lines(after)
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    if max(len(old), len(new)) > _MAX_DIFF_LINES:
        known = set(old)
        return [line for line in new if line not in known]
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    return [
        line
        for tag, _, _, start, stop in matcher.get_opcodes()
        if tag in ("replace", "insert")
        for line in new[start:stop]
    ]


def _lines(content: bytes | None) -> list[str]:
    return (
        []
        if content is None
        else [line.removesuffix("\n") for line in split_lines(content.decode(errors="replace"))]
    )


@lru_cache(maxsize=256)
def _comments(content: bytes | None) -> tuple[str, ...]:
    """Comments, and strings that are statements. If the text does not tokenize: those before the fault."""
    found: list[str] = []
    is_alone = True
    try:
        for token in tokenize.tokenize(io.BytesIO(content or b"").readline):
            if token.type == tokenize.COMMENT:
                found.append(token.string.lstrip("#").strip())
            elif token.type == tokenize.STRING and is_alone and token.line.strip()[:1] in "\"'rR":
                found.append(token.string.strip("\"' \n"))
            is_alone = token.type in (
                tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT,
                tokenize.ENCODING, tokenize.COMMENT,
            )  # fmt: skip
    except (tokenize.TokenError, SyntaxError, UnicodeDecodeError):
        pass
    return tuple(found)
