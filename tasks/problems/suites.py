"""Suites: folders of problems for evaluation, with slices by rules and a checksum of every file.

A suite holds suite.toml (its card), SHA256SUMS, and the files of a problem set: problems.jsonl and repositories.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import tomli_w
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from ostinato.infra.platform.artifacts import fingerprint
from ostinato.infra.platform.bounded_files import MAX_FILE_BYTES, parse_toml, read_bounded
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.folders import read_folder, write_folder
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.repository import CACHE_DIRECTORIES, MANIFEST_NAME
from ostinato.tasks.problems.config import PROBLEMS_FILE
from ostinato.tasks.problems.published import REPOSITORIES_FOLDER, load_repositories, read_problems
from ostinato.tasks.records import Problem

SUITE_FILE, SUMS_FILE = "suite.toml", "SHA256SUMS"


class SliceRule(Record):
    """Rule of a slice. A problem is in the slice if every given condition holds."""

    kinds: tuple[str, ...] = Field(
        default=(), description="kinds of problems as shell patterns, such as deleted_*; empty: any"
    )
    more_changed_lines_than: NonNegativeInt | None = Field(
        default=None, description="number of changed lines that it exceeds; None: any number"
    )
    prompt_level: str = Field(default="", description="wording of the prompt; empty: any")

    def holds(self, problem: Problem) -> bool:
        """Whether a problem is in the slice."""
        least = self.more_changed_lines_than
        return (
            (not self.kinds or any(fnmatchcase(problem.kind, kind) for kind in self.kinds))
            and self.prompt_level in ("", problem.prompt_level)
            and (least is None or problem.num_changed_lines > least)
        )


# The slices by kind share no problem; `long` and `vague` overlap with them.
SLICES = {
    "bug": SliceRule(kinds=("mutation", "combined", "multi_place")),
    "feature": SliceRule(kinds=("deleted_*",)),
    "refactor": SliceRule(kinds=("refactoring",)),
    "tests": SliceRule(kinds=("missing_tests",)),
    "question": SliceRule(kinds=("question",)),
    "no_edit": SliceRule(kinds=("no_edit",)),
    "commit": SliceRule(kinds=("mined_*",)),
    "given": SliceRule(kinds=("given",)),
    "long": SliceRule(more_changed_lines_than=100),
    "vague": SliceRule(prompt_level="vague"),
}


class SuiteCard(Record):
    """The content of suite.toml."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    version: PositiveInt = 1
    problems: PositiveInt = Field(description="number of problems")
    slices: dict[str, SliceRule] = Field(description="rules by the name of the slice")
    sha256: str = Field(description="SHA-256 of SHA256SUMS, which lists that of every other file")

    @property
    def title(self) -> str:
        """Name on scorecards. Suites with other files or rules have other titles."""
        return f"{self.name}@{self.version}-{fingerprint(self)[:8]}"


def assign_slices(
    problems: Iterable[Problem], rules: Mapping[str, SliceRule]
) -> dict[str, tuple[str, ...]]:
    """Ids of the problems of each slice, in their order. Slices without problems are left out."""
    problems = list(problems)
    found = {
        name: tuple(one.problem_id for one in problems if rule.holds(one))
        for name, rule in rules.items()
    }
    return {name: ids for name, ids in found.items() if ids}


def choose_problems(
    problems: Iterable[Problem], rules: Mapping[str, SliceRule], max_per_slice: int | None
) -> list[Problem]:
    """Problems that are in a slice, ordered by id. Each slice chooses its first `max_per_slice` in the order of the
    ids' hashes; a problem that another slice chose remains in all its slices. None: all.
    """
    by_id = {problem.problem_id: problem for problem in problems}
    chosen: set[str] = set()
    for ids in assign_slices(by_id.values(), rules).values():
        chosen.update(sorted(ids, key=lambda one: sha256(one.encode()).digest())[:max_per_slice])
    return [by_id[one] for one in sorted(chosen)]


def write_suite(
    source: Path, target: Path, problems: Sequence[Problem], name: str, version: int
) -> SuiteCard:
    """Writes a suite of problems of the set in `source` to a new or empty folder."""
    if target.exists() and any(target.iterdir()):
        raise ProblemError(f"{target} is not empty, wanted a new folder for the suite")
    load_repositories(source)  # ProblemError for one that differs from that of the proofs
    files = {PROBLEMS_FILE: "".join(f"{one.model_dump_json()}\n" for one in problems).encode()}
    for repository in sorted({problem.repository for problem in problems}):
        place = f"{REPOSITORIES_FOLDER}/{repository}"
        found = read_folder(source / place, left_out=CACHE_DIRECTORIES)
        files |= {f"{place}/{path}": content for path, content in found.items()}
    card = SuiteCard(
        name=name,
        version=version,
        problems=len(problems),
        slices={slice_name: SLICES[slice_name] for slice_name in assign_slices(problems, SLICES)},
        sha256=sha256(list_checksums(files)).hexdigest(),
    )
    write_files(target, card, files)
    return card


def write_files(target: Path, card: SuiteCard, files: Mapping[str, bytes]) -> None:
    """Writes the card and the other files of a suite."""
    text = tomli_w.dumps(card.model_dump(mode="json", exclude_defaults=True))
    write_folder(target, {**files, SUITE_FILE: text.encode(), SUMS_FILE: list_checksums(files)})


def list_checksums(files: Mapping[str, bytes]) -> bytes:
    """The content of SHA256SUMS, for `sha256sum --check`."""
    lines = (f"{sha256(content).hexdigest()}  {path}\n" for path, content in sorted(files.items()))
    return "".join(lines).encode(errors="surrogateescape")


def read_card(folder: Path) -> SuiteCard:
    """The card of a suite, unchecked."""
    path = folder / SUITE_FILE
    try:
        content = read_bounded(path, error_type=ProblemError)
        return SuiteCard.model_validate(parse_toml(str(path), content, ProblemError))
    except ValidationError as error:
        raise ProblemError(f"{path} is no card of a suite: {error}") from None


def read_suite(folder: Path) -> tuple[SuiteCard, dict[str, bytes]]:
    """Card and files of a suite, links left out. ProblemError if a file is missing, added or changed, the number of
    problems is wrong, a repository is missing, or a slice has no problem.
    """
    card, files = read_card(folder), read_folder(folder, most_bytes=MAX_FILE_BYTES)
    listed = files.pop(SUMS_FILE, b"")
    files.pop(SUITE_FILE, None)
    seen = list_checksums(files)
    if sha256(seen).hexdigest() != card.sha256 or listed != seen:
        odd = {line[66:].decode() for line in {*seen.splitlines()} ^ {*listed.splitlines()}}
        raise ProblemError(
            f"suite {folder}: {', '.join(sorted(odd)[:5]) or SUMS_FILE} differ from what {SUITE_FILE} lists by SHA-256 "
            f"{card.sha256}; copy the folder from its source again"
        )
    problems = read_problems(files.get(PROBLEMS_FILE, b""), str(folder / PROBLEMS_FILE))
    count = len({problem.problem_id for problem in problems})
    places = {f"{REPOSITORIES_FOLDER}/{problem.repository}/{MANIFEST_NAME}" for problem in problems}
    absent = sorted(places - files.keys())
    empty = sorted(card.slices.keys() - assign_slices(problems, card.slices).keys())
    if not count == len(problems) == card.problems or absent or empty:
        raise ProblemError(
            f"suite {folder} has {len(problems)} problems with {count} ids, without {absent}, and none in slices "
            f"{empty}; wanted {card.problems} and none missing: correct {SUITE_FILE}"
        )
    return card, files
