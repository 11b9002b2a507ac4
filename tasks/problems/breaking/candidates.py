"""Candidates: possible problems before their proof, with identity and broken files."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.infra.platform.syntax import parse_python
from ostinato.tasks.problems.breaking.definitions import CallKey, Definition
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.records import BlockEdit, LineEdit, Problem, Split, WantedReply

LARGE_DELETIONS = ("skeleton", "subject")  # operators of deleted features


class Candidate(Record):
    """A broken state of one repository."""

    repository: str
    kind: Kind
    operator: str
    path: str = Field(description="file of the main symbol")
    symbol: str
    first_line: int
    last_line: int
    edits: tuple[LineEdit, ...] = ()
    blocks: tuple[BlockEdit, ...] = ()
    touched: tuple[CallKey, ...] = Field(
        description="changed functions, as test profiles name them"
    )
    test_files: tuple[str, ...] = ()
    """files with only covering tests, in addition to the tests that call a changed function"""
    message: str = ""
    """message of the mined commit, or text of a given task or a question"""
    named_failing: tuple[str, ...] = ()
    """tests of a given task that must fail; empty: found by running"""
    named_passing: tuple[str, ...] = ()
    """tests of a given task that must pass before and after the fix, or of a problem without a broken line"""
    adapted_tests: tuple[BlockEdit, ...] = ()
    """edits of tests and other files that no attempt may change, with which a refactoring's broken state is whole"""
    facts: dict[str, str] = Field(default={})
    """facts that only the judge knows, or from which a question is answered"""
    reply: WantedReply | None = None
    """final message that a problem without a broken line wants"""
    decoy: str = Field(default="", description="mutation that gives a no-edit problem its prompt")

    @classmethod
    def at(cls, main: Definition, **fields: Any) -> Self:
        """A candidate with the main symbol `main`. `fields`: its other fields."""
        return cls(
            path=main.path,
            symbol=main.qualified_name,
            first_line=main.decorator_line,
            last_line=main.last_line,
            **fields,
        )

    @property
    def candidate_id(self) -> str:
        """Identity by content, equal in all runs and on all machines."""
        texts = [f"{e.path}:{e.line_number}:{e.gold_text}:{e.broken_text}" for e in self.edits]
        for block in self.blocks:
            gold, broken = "\n".join(block.gold_lines), "\n".join(block.broken_lines)
            texts.append(f"{block.path}:{block.first_line}:{gold}:{broken}")
        if self.reply is not None:
            texts += [self.path, self.decoy, self.message]
        digest = draw_rank(self.repository, self.symbol, *texts)[:10]
        name = self.symbol.rpartition(".")[2].strip("_") or "code"
        is_mutation = self.kind is Kind.MUTATION
        label = self.operator if is_mutation else f"{self.kind.value}-{self.operator}"
        return f"{self.repository}-{name}-{label}-{digest}"

    @property
    def asks_for_hash(self) -> bool:
        """Whether the problem is to repair a `__hash__`. Any constant passes as a hash, so the repair would prove
        nothing. In a commit, a given task or a large deletion, a `__hash__` among other changes is allowed.
        """
        hashes = [name.rpartition(".")[2] == "__hash__" for _, _, name in self.touched]
        is_large = self.kind in (Kind.MINED_COMMIT, Kind.GIVEN) or self.is_large_deletion
        return any(hashes) and (not is_large or all(hashes))

    @property
    def is_large_deletion(self) -> bool:
        """Whether it was made by `FeatureMaker` (features.py)."""
        return self.operator in LARGE_DELETIONS

    def draft(self, fingerprint: str) -> Problem:
        """The problem of the candidate, still without tests, prompt and split."""
        return Problem(
            problem_id=self.candidate_id,
            repository=self.repository,
            repository_fingerprint=fingerprint,
            kind=self.kind.value,
            operator=self.operator,
            path=self.path,
            symbol=self.symbol,
            first_line=self.first_line,
            last_line=self.last_line,
            prompt="",
            edits=self.edits,
            blocks=self.blocks,
            cut_tests=self.adapted_tests,
            facts=self.facts,
            fail_to_pass=(),
            pass_to_pass=(),
            split=Split.TRAIN,
            reply=self.reply,
        )

    def broken_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        return self.draft("").break_files(files)


def draw_rank(*parts: str) -> str:
    """A pseudo-random rank that depends on the parts alone. Sorting by it gives a reproducible shuffle."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def take_turns(sources: Iterable[Iterable[Candidate]]) -> Iterator[Candidate]:
    """The first candidate of each source, then the second of each, and so on, each candidate once."""
    seen: set[str] = set()
    for turn in itertools.zip_longest(*sources):
        for candidate in turn:
            if candidate is not None and candidate.candidate_id not in seen:
                seen.add(candidate.candidate_id)
                yield candidate


class LinePlan:
    """Planned changes of a repository's files, line by line. The last change of a line wins."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._lines: dict[str, list[str]] = {}
        self._changes: dict[str, dict[int, tuple[str, ...]]] = {}

    def lines_of(self, path: str) -> list[str]:
        """Lines of the pristine file."""
        if path not in self._lines:
            self._lines[path] = self._files[path].decode().split("\n")
        return self._lines[path]

    def replace(self, path: str, first: int, last: int, new_lines: Iterable[str] = ()) -> None:
        """Replaces the lines first to last, 1-based and inclusive, by `new_lines`."""
        changes = self._changes.setdefault(path, {})
        for number in range(first, last + 1):
            changes[number] = ()
        changes[first] = tuple(new_lines)

    def remove_with_space(self, path: str, first: int, last: int) -> None:
        """Removes lines and the blank lines before them."""
        lines = self.lines_of(path)
        while first > 1 and not lines[first - 2].strip():
            first -= 1
        self.replace(path, first, last)

    def is_changed(self, path: str, number: int) -> bool:
        """Whether the plan changes a line."""
        return number in self._changes.get(path, {})

    def text_of(self, path: str) -> str:
        """The file with its changes."""
        changes = self._changes.get(path, {})
        lines: list[str] = []
        for number, line in enumerate(self.lines_of(path), 1):
            lines += changes.get(number, (line,))
        return "\n".join(lines)

    def parses(self) -> bool:
        """Whether every changed Python file still parses."""
        try:
            for path in self._changes:
                if path.endswith(".py"):
                    parse_python(self.text_of(path))
        except SyntaxError:
            return False
        return True

    def blocks(self) -> tuple[BlockEdit, ...]:
        """The changes as edits, with neighbouring lines in one edit."""
        blocks: list[BlockEdit] = []
        for path in sorted(self._changes):
            changes = self._changes[path]
            run: list[int] = []
            for number in sorted(changes):
                if run and number != run[-1] + 1:
                    blocks.append(self._block(path, run))
                    run = []
                run.append(number)
            blocks.append(self._block(path, run))
        return tuple(block for block in blocks if block.gold_lines != block.broken_lines)

    def _block(self, path: str, run: list[int]) -> BlockEdit:
        lines = self.lines_of(path)
        return BlockEdit(
            path=path,
            first_line=run[0],
            gold_lines=tuple(lines[run[0] - 1 : run[-1]]),
            broken_lines=tuple(line for number in run for line in self._changes[path][number]),
        )
