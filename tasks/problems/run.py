"""Child entry of the problem stage.

The order of work and the published files: problems.jsonl, statistics.json and repositories/NAME,
made in a folder that is complete only when the result is returned.
"""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.source_archives import fetch_archive, read_archive
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.build import BuiltProblems, build_problems
from ostinato.tasks.problems.config import (
    DescribedSource,
    ProblemsRequest,
    ProblemsResult,
    RepositorySource,
)
from ostinato.tasks.problems.descriptions import Descriptions, describe_functions
from ostinato.tasks.problems.proving import ProofOutcome
from ostinato.tasks.problems.repositories import prepare_repository, strip_prefix
from ostinato.tasks.records import Split

PROBLEMS_FILE = "problems.jsonl"
STATISTICS_FILE = "statistics.json"
REPOSITORIES_FOLDER = "repositories"
_JOURNAL = "proven.jsonl"


def main(request: ProblemsRequest, workspace: Workspace) -> ProblemsResult:
    """Build the problems of a recipe; called again after a kill it continues."""
    started = time.monotonic()
    config = request.config
    target = workspace.directory / "problems"
    cache = Path(request.archives_directory or workspace.settings.home / "cache" / "archives")
    prepared, descriptions = _prepare(request, target, cache, workspace)
    built = asyncio.run(
        build_problems(
            prepared,
            config,
            workspace.directory / _JOURNAL,
            workspace.progress.update,
            descriptions,
        )
    )
    statistics = _summarise(built)
    (target / PROBLEMS_FILE).write_text(
        "".join(problem.model_dump_json() + "\n" for problem in built.problems)
    )
    (target / STATISTICS_FILE).write_text(json.dumps(statistics, indent=1, sort_keys=True))
    return ProblemsResult(
        directory=str(target),
        num_problems=len(built.problems),
        num_candidates=built.proofs.total(),
        yield_ratio=statistics["yield_ratio"],
        split_sizes=statistics["split_sizes"],
        operators=statistics["operators"],
        repositories={repository.name: repository.fingerprint for _, repository in prepared},
        seconds=time.monotonic() - started,
    )


def _prepare(
    request: ProblemsRequest, target: Path, cache: Path, workspace: Workspace
) -> tuple[list[tuple[RepositorySource, PreparedRepository]], Descriptions]:
    prepared: list[tuple[RepositorySource, PreparedRepository]] = []
    descriptions: dict[tuple[str, str, str], str] = {}
    sources = request.config.repositories
    for number, source in enumerate(sources):
        workspace.progress.update(number, len(sources), f"fetching {source.name} {source.version}")
        files = read_archive(fetch_archive(source.archive, cache))
        if isinstance(source, DescribedSource):
            files = strip_prefix(files, source.stripped_prefix)
            descriptions |= describe_functions(source, files)
        directory = target / REPOSITORIES_FOLDER / source.name
        repository = prepare_repository(
            source, files, directory, strip_text=request.config.strip_text
        )
        prepared.append((source, repository))
    return prepared, descriptions


def _summarise(built: BuiltProblems) -> dict:
    problems = built.problems
    sizes = Counter(problem.split.value for problem in problems)
    outcomes: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for (operator, outcome), count in built.proofs.items():
        outcomes[outcome.value] += count
        tried[operator] += count
    candidates = outcomes.total()
    return {
        "num_problems": len(problems),
        "num_functions": built.num_functions,
        "num_raw_mutations": built.num_raw_mutations,
        "candidates": dict(outcomes),
        "yield_ratio": outcomes[ProofOutcome.PROVEN.value] / candidates if candidates else 0.0,
        "yield_by_operator": {
            operator: built.proofs[operator, ProofOutcome.PROVEN] / count
            for operator, count in tried.items()
        },
        "split_sizes": {split.value: sizes[split.value] for split in Split},
        "operators": dict(Counter(problem.operator for problem in problems)),
        "functions_by_split": {
            split.value: len(
                {(item.repository, item.symbol) for item in problems if item.split is split}
            )
            for split in Split
        },
        "tests": built.tests,
    }
