"""A recipe's problems built anew and compared with the set in use, byte for byte.

    python -m tests.benchmarks.problem_verification [--recipe problems_16] [--ship]

The set in use is the one that ships for the recipe, otherwise the one that its stages built before (built when there
is none). --ship: puts the problems on which both builds agree into tasks/problems/sets, for a commit; refused where
a set ships for the recipe already. Ends with an error when a problem of the set in use was not made again.
"""

import argparse
import hashlib
from collections import Counter
from pathlib import Path

import zstandard

from ostinato.flows.stages import chain
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import fingerprint
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.tasks.problems.config import ProblemsConfig, ProblemsRequest, ProblemsResult
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.problems.publishing import count_published
from ostinato.tasks.problems.shipped import SETS, DatasetCard, find_set, shipped_checksum
from ostinato.tasks.records import Problem
from tests.benchmarks.beside_server import ensure_server

ENTRY = "ostinato.tasks.problems.run:main"
LEVEL = 19


def verify(recipe: str, *, ships: bool = False, folder: Path = SETS) -> str:
    """What was compared or shipped, in one line. ProblemError names what was not made again."""
    context = StageContext.open(recipe)
    config = context.recipe.problems
    if ships and (checksum := shipped_checksum(config, folder)) is not None:
        raise ConfigError(
            f"recipe {recipe}: {folder} holds a set for it already, sha256 {checksum}; remove its two files to put "
            "another in its place"
        )
    wanted, name = _set_in_use(context)
    request = ProblemsRequest(
        config=config,
        archives_directory=context.settings.cache_directory / "archives",
        use_shipped=False,
    )
    directory = context.runs_directory / f"rebuilt-problems-{fingerprint(config)}"
    result = run_child(ENTRY, request, ProblemsResult, directory=directory)
    lines = (Path(result.directory) / PROBLEMS_FILE).read_bytes()
    if ships:
        card = ship_set(context.recipe.name, config, result, agreed_lines(wanted, lines), folder)
        left_out = wanted.count(b"\n") - card.result.num_problems
        return f"{folder} holds {card.result.num_problems} problems, {left_out} of one build are left out"
    if differences := compare_with_shipped(lines, wanted):
        raise ProblemError(f"recipe {recipe}, compared with {name}: " + "\n".join(differences))
    others = lines.count(b"\n") - wanted.count(b"\n")
    checksum = hashlib.sha256(wanted).hexdigest()
    return f"all problems of {name} were made again, sha256 {checksum}; others beside: {others}"


def _set_in_use(context: StageContext) -> tuple[bytes, str]:
    """Lines of the set that the recipe's stages take, and its name."""
    shipped = find_set(context.recipe.problems)
    if shipped is not None:
        return shipped[1], "the shipped set"
    built = chain.build_proven_problems(context)
    return (context.directory_of(built) / PROBLEMS_FILE).read_bytes(), str(built)


def agreed_lines(first: bytes, second: bytes) -> bytes:
    """Problems of the first build that the second has too, byte for byte, in the order of the first."""
    found = frozenset(second.splitlines(keepends=True))
    return b"".join(line for line in first.splitlines(keepends=True) if line in found)


def ship_set(
    name: str, config: ProblemsConfig, result: ProblemsResult, lines: bytes, folder: Path = SETS
) -> DatasetCard:
    """Write problems to the folder of shipped sets. `result` is that of a build which made them all, and others."""
    card = DatasetCard(
        config=fingerprint(config),
        sha256=hashlib.sha256(lines).hexdigest(),
        result=_counted_again(result, lines),
    )
    folder.mkdir(parents=True, exist_ok=True)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(lines)
    (folder / f"{name}.jsonl.zst").write_bytes(packed)
    (folder / f"{name}.json").write_text(card.model_dump_json(indent=1) + "\n")
    return card


def _counted_again(result: ProblemsResult, lines: bytes) -> ProblemsResult:
    problems = [Problem.model_validate_json(line) for line in lines.splitlines()]
    published = Counter((problem.repository, problem.kind) for problem in problems)
    rows = (
        {**row, "published": published[str(row["repository"]), str(row["kind"])]}
        for row in result.yield_table
    )
    changed = {
        "directory": "",
        "num_problems": len(problems),
        "yield_table": tuple(rows),
        **count_published(problems),
    }
    return result.model_copy(update=changed)


def compare_with_shipped(lines: bytes, shipped: bytes) -> list[str]:
    """Shipped problems that a build did not make byte for byte, in words. Empty when it made all; it may have made
    others beside: where two builds chose differently nothing ships.
    """
    built, wanted = (dict.fromkeys(content.splitlines()) for content in (lines, shipped))
    missing = [line for line in wanted if line not in built]
    if not missing:
        return []
    added = [line for line in built if line not in wanted]
    return [
        f"{len(missing)} of {len(wanted)} shipped problems were not built, {len(added)} others were",
        *(f"not built: {line[:200].decode(errors='replace')}" for line in missing[:5]),
        *(f"built instead: {line[:200].decode(errors='replace')}" for line in added[:5]),
    ]


def main() -> None:
    """Verifies and prints the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="problems_16")
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()
    ensure_server("tests.benchmarks.problem_verification")
    print(verify(options.recipe, ships=options.ship))


if __name__ == "__main__":
    main()
