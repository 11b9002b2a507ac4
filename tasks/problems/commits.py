"""Mines problems from a git history: product code before a commit, tests after it. Code of the repository
never runs here.
"""

import difflib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.git import read_tree, run_git
from ostinato.infra.sandbox.discovery.layout import find_layout, strip_prefix
from ostinato.infra.sandbox.inside.sources import RULES_FILE, is_test_name
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.breaking.definitions import read_definitions
from ostinato.tasks.problems.config import GitSource, Kind
from ostinato.tasks.problems.repositories import MAX_FILE_BYTES, prepare_repository
from ostinato.tasks.records import BlockEdit

_MIN_SUBJECT = 12
_MIN_WORDS = 3  # shorter lines are remains of a removed reference
_BOT = re.compile(r"\[bot\]|dependabot|renovate|pre-commit-ci|github-actions", re.IGNORECASE)
_NO_CHANGE = re.compile(
    r"^(docs?|chore|ci|style|build|release|bump|typo|revert|wip|merge|version)\b", re.IGNORECASE
)
_SIGNAL = re.compile(
    r"\b(fix\w*|bug\w*|error|crash\w*|wrong|incorrect|fail\w*|broken|handle\w*|add\w*|support\w*|"
    r"implement\w*|allow\w*|avoid\w*|correct\w*|raise\w*|return\w*|regression|issue)\b",
    re.IGNORECASE,
)
_FUNCTION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
_NOISE = (
    re.compile(r"^(signed-off-by|co-authored-by|reviewed-by|change-id):.*$", re.I | re.M),
    re.compile(r"(?:,?\s*\bsee\s+)?https?://\S+", re.I),
    re.compile(r"\(?\b(?:fix(?:e[sd])?|close[sd]?|resolve[sd]?|refs?|see|gh-?)?:?\s*#\d+\)?", re.I),
    re.compile(r"\(?#\d+\)?"),
    re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b"),
    re.compile(r"^(fix(e[sd])?|bug ?fix|feat(ure)?|perf|refactor)(\([^)]*\))?\s*:\s*", re.I | re.M),
)


@dataclass(frozen=True)
class MinedCommit:
    """One commit as a repository of its own, with its candidate."""

    repository: PreparedRepository
    candidate: Candidate


@dataclass
class Mining:
    """Problems of a history, and the number of commits refused by reason."""

    found: list[MinedCommit] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def mine_commits(source: GitSource, directory: Path, installed: Mapping[str, bytes]) -> Mining:
    """Commits along first parents, newest first, that change product code and add a test.

    A merge counts as its change against the first parent. Each usable commit is prepared below
    `directory`/NAME-COMMIT. `installed`: files of its dependencies.
    """
    mining = Mining()
    log = run_git(
        Path(source.path), "log", "-z", "--first-parent", f"--max-count={source.max_commits}",
        "--format=%H%x00%P%x00%an <%ae>%x00%B", source.revision,
    ).decode(errors="replace")  # fmt: skip
    fields = iter(log.split("\0"))  # no commit message contains a zero byte
    for commit, parents, author, message in zip(fields, fields, fields, fields, strict=False):
        if len(mining.found) >= source.max_problems:
            break
        if len(parents.split()) > 1:  # the text follows the line "Merge pull request"
            message = message.strip().partition("\n")[2].strip()
        reason = _refuse(parents.split(), author, message)
        made = None if reason else _make(source, commit, message, directory, installed)
        if isinstance(made, MinedCommit):
            mining.found.append(made)
        else:
            mining.refused[reason or str(made)] += 1
    return mining


def clean_message(message: str) -> str:
    """A commit message as a user could write it: without hashes, links or numbers that lead to the fix."""
    for pattern in _NOISE:
        message = pattern.sub("", message)
    lines = [" ".join(line.split()) for line in message.strip().split("\n")]
    kept = [line for n, line in enumerate(lines) if n == 0 or len(line.split()) >= _MIN_WORDS]
    text = "\n".join(kept).strip()
    return text[:1].upper() + text[1:]


def _refuse(parents: Sequence[str], author: str, message: str) -> str:
    subject = message.strip().split("\n")[0]
    if not parents:
        return "first_commit"
    if len(parents) > 1 and not subject:
        return "merge_without_text"
    if _BOT.search(author):
        return "bot"
    if len(subject) < _MIN_SUBJECT:
        return "short_message"
    if _NO_CHANGE.search(subject):
        return "not_a_change"
    return "" if _SIGNAL.search(message) else "no_signal"


def _make(
    source: GitSource, commit: str, message: str, directory: Path, installed: Mapping[str, bytes]
) -> MinedCommit | str:
    """The commit as a problem, or the reason why it cannot be one."""
    parent = f"{commit}^1"
    if not _changed(source, parent, commit):
        return "no_source"
    tree = read_tree(Path(source.path), commit, max_file_bytes=MAX_FILE_BYTES)
    source = _with_layout_of(source, tree)
    changes = _changed(source, parent, commit)
    product = {p: s for p, s in changes.items() if _is_product(p, source)}
    tests = [path for path in changes if is_below(path, source.test_paths)]
    if not product:
        return "no_source"
    if set(product.values()) != {"M"}:
        return "adds_or_removes_files"
    files = strip_prefix(tree, source.stripped_prefix)
    earlier = read_tree(Path(source.path), parent, max_file_bytes=MAX_FILE_BYTES)
    earlier = strip_prefix(earlier, source.stripped_prefix)
    if not all(_is_text(tree.get(path)) for path in product for tree in (earlier, files)):
        return "no_plain_text"  # a link, or another encoding
    rules = source.generated_files.get(RULES_FILE, "")
    if not any(_new_tests(earlier, path, files, rules) for path in tests):
        return "no_new_test"
    blocks = diff_blocks(
        {path: files[path] for path in product}, {path: earlier[path] for path in product}
    )
    size = sum(max(len(block.gold_lines), len(block.broken_lines)) for block in blocks)
    if not 1 <= size <= source.max_changed_lines:
        return "wrong_size"
    name = f"{source.name}-{commit[:8]}"
    described = source.model_copy(update={"name": name})
    try:
        repository = prepare_repository(
            described, files, directory / name, strip_text=False, installed=installed
        )
    except ProblemError:
        return "no_such_paths"
    candidate = describe_change(name, blocks, files)
    details = {"test_files": tuple(sorted(tests)), "message": clean_message(message)}
    return MinedCommit(repository, candidate.model_copy(update=details))


def _with_layout_of(source: GitSource, tree: Mapping[str, bytes]) -> GitSource:
    """The source with the paths of this commit, if the project has moved its files since."""
    files = strip_prefix(tree, source.stripped_prefix)
    wanted = (*source.package_paths, *source.test_paths)
    if all(any(is_below(path, (root,)) for path in files) for root in wanted):
        return source
    names = [path.partition("/")[0].removesuffix(".py") for path in source.package_paths]
    try:
        layout = find_layout(tree, names[0], top_level=names)
    except ProblemError:
        return source
    return source.model_copy(update=layout.model_dump())


def diff_blocks(gold: Mapping[str, bytes], broken: Mapping[str, bytes]) -> tuple[BlockEdit, ...]:
    """The edits that turn the gold state into the broken state."""
    blocks: list[BlockEdit] = []
    for path in sorted(gold):
        new, old = gold[path].decode().split("\n"), broken[path].decode().split("\n")
        matcher = difflib.SequenceMatcher(None, new, old, autojunk=False)
        blocks += [
            BlockEdit(
                path=path,
                first_line=start + 1,
                gold_lines=tuple(new[start:end]),
                broken_lines=tuple(old[other_start:other_end]),
            )
            for kind, start, end, other_start, other_end in matcher.get_opcodes()
            if kind != "equal"
        ]
    return tuple(blocks)


def describe_change(
    name: str, blocks: tuple[BlockEdit, ...], files: Mapping[str, bytes]
) -> Candidate:
    """The candidate of a change. Its main symbol is the first function that the change touches."""
    changed = {
        (block.path, line)
        for block in blocks
        for line in range(block.first_line, block.first_line + max(1, len(block.gold_lines)))
    }
    paths = sorted({block.path for block in blocks})
    touched = [
        item
        for path, definitions in read_definitions({path: files[path] for path in paths}).items()
        for item in definitions
        if not item.is_class and any(p == path and item.contains(line) for p, line in changed)
    ]
    main = touched[0] if touched else None
    path = main.path if main else blocks[0].path
    symbol = main.qualified_name if main else path.rpartition("/")[2].removesuffix(".py")
    return Candidate(
        repository=name,
        kind=Kind.MINED_COMMIT,
        operator="reverted",
        path=path,
        symbol=symbol,
        first_line=main.decorator_line if main else blocks[0].first_line,
        last_line=main.last_line if main else blocks[0].first_line + len(blocks[0].gold_lines),
        blocks=blocks,
        touched=tuple(item.call_key for item in touched),
    )


def _new_tests(
    earlier: Mapping[str, bytes], path: str, files: Mapping[str, bytes], rules: str
) -> frozenset[str]:
    before, after = (
        frozenset(_FUNCTION.findall(tree.get(path, b"").decode(errors="replace")))
        for tree in (earlier, files)
    )
    return frozenset(name for name in after - before if is_test_name(name, rules))


def _is_text(content: bytes | None) -> bool:
    try:
        return content is not None and content.decode() is not None
    except UnicodeDecodeError:
        return False


def _changed(source: GitSource, parent: str, commit: str) -> dict[str, str]:
    """Status letter of each changed Python file, by its path on the import path."""
    asked = ("diff", "--name-status", "--no-renames", "-z", parent, commit)
    text = os.fsdecode(run_git(Path(source.path), *asked))
    fields = text.rstrip("\0").split("\0")
    letters = dict(zip(fields[1::2], fields[0::2], strict=True)) if text else {}
    prefix = f"{source.stripped_prefix}/"
    return {p.removeprefix(prefix): s for p, s in letters.items() if p.endswith(".py")}


def _is_product(path: str, source: GitSource) -> bool:
    return is_below(path, source.package_paths) and not is_below(path, source.test_paths)
