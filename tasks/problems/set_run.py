"""Child entry of problem sets: many repositories in, one set of proven problems out.

The order of work and the published files: problems.jsonl, oracles.jsonl, statistics.json,
yield_table.json and repositories/NAME. Called again after a kill it continues from its journals.
"""

import asyncio
import json
import logging
import time
from pathlib import Path

from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.source_archives import (
    fetch_archive,
    fetch_wheel,
    read_archive,
    read_wheel,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.tasks.problems.actor import ProverPool
from ostinato.tasks.problems.assembly import ProblemSet, assemble, summarise
from ostinato.tasks.problems.commits import mine_commits
from ostinato.tasks.problems.config import ProblemsResult
from ostinato.tasks.problems.repositories import prepare_repository, strip_prefix
from ostinato.tasks.problems.set_build import BuiltPart, Part, PartBuilder
from ostinato.tasks.problems.set_config import (
    YIELD_FILE,
    Kind,
    PackageSource,
    ProblemSetConfig,
    ProblemSetRequest,
)
from ostinato.tasks.problems.validity import Finding

logger = logging.getLogger(__name__)

PROBLEMS_FILE = "problems.jsonl"
ORACLES_FILE = "oracles.jsonl"
STATISTICS_FILE = "statistics.json"
REPOSITORIES_FOLDER = "repositories"


def main(request: ProblemSetRequest, workspace: Workspace) -> ProblemsResult:
    """Build the set."""
    started = time.monotonic()
    target = workspace.directory / "problems"
    preparing = _Preparing(request, target / REPOSITORIES_FOLDER, workspace)
    parts = preparing.prepare()
    progress = _Progress(workspace, parts, request.config)
    num_workers = workspace.settings.cpu_limit if request.workers is None else request.workers
    if num_workers:
        start_ray(num_workers, workspace.settings.object_store_memory_bytes)
    try:
        built = asyncio.run(
            _build(num_workers, parts, request.config, workspace, progress, preparing)
        )
    finally:
        stop_ray()
    if not built:
        raise ProblemError(f"no repository gave a problem: {preparing.failures}")
    workspace.progress.update(1, 1, "writing the problem set")
    made = assemble(built, request.config)
    figures = summarise(made, built, preparing.failures)
    figures["wall_seconds"] = round(time.monotonic() - started, 1)
    _write(target, made, built, figures)
    return ProblemsResult(
        directory=str(target),
        num_problems=len(made.problems),
        num_candidates=figures["num_candidates"],
        yield_ratio=figures["yield_ratio"],
        split_sizes=figures["split_sizes"],
        operators=figures["operators"],
        repositories={b.part.repository.name: b.part.repository.fingerprint for b in built},
        seconds=time.monotonic() - started,
    )


async def _build(
    num_workers: int,
    parts: list[Part],
    config: ProblemSetConfig,
    workspace: Workspace,
    progress: "_Progress",
    preparing: "_Preparing",
) -> list[BuiltPart]:
    pool = (
        ProverPool.on_ray(num_workers, workspace.directory.name, config.rules, config.seed)
        if num_workers
        else ProverPool.in_process(config.rules, config.seed)
    )
    # one repository more than workers, so that none waits for the last batch of another
    at_once = asyncio.Semaphore(pool.num_workers + 1)

    async def build_part(part: Part) -> BuiltPart | None:
        name = part.repository.name
        async with at_once:
            builder = PartBuilder(part, config, pool, workspace.directory, progress.judged)
            progress.show(name)
            try:
                built = await builder.build()
            except ProblemError as error:
                logger.warning("repository left out %s", fields(name=name, error=str(error)))
                preparing.failures[name] = str(error)
                return None
            num = len(built.proven)
            logger.info("repository done %s", fields(name=name, problems=num))
            return built

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(build_part(part)) for part in parts]
    except ExceptionGroup as error:
        raise error.exceptions[0] from error
    finally:
        await pool.close()
    return [built for task in tasks if (built := task.result()) is not None]


class _Preparing:
    """Fetches and prepares every source; one that cannot be had is noted and left out."""

    def __init__(self, request: ProblemSetRequest, target: Path, workspace: Workspace) -> None:
        self.failures: dict[str, str] = {}
        self._request = request
        self._target = target
        self._workspace = workspace

    def prepare(self) -> list[Part]:
        """All parts, largest code first: the longest work should not begin last."""
        config = self._request.config
        parts: list[Part] = []
        total = len(config.packages) + len(config.git)
        for number, source in enumerate(config.packages):
            told = f"fetching {source.name} {source.version}"
            self._workspace.progress.update(number, total, told)
            try:
                parts.append(self._package(source))
            except (ConfigError, ProblemError) as error:
                self.failures[source.name] = str(error)
                logger.warning("package left out %s", fields(name=source.name, error=str(error)))
        for source in config.git:
            mining = mine_commits(source, self._target)
            told = fields(name=source.name, found=len(mining.found), **mining.refused)
            logger.info("mined %s", told)
            parts += [
                Part(item.repository, source.split, mined=(item.candidate,))
                for item in mining.found
            ]
        parts.sort(key=lambda part: -sum(map(len, part.repository.files.values())))
        return parts

    def _package(self, source: PackageSource) -> Part:
        cache = self._request.archives_directory
        files = strip_prefix(
            read_archive(fetch_archive(source.archive, cache)), source.stripped_prefix
        )
        beside: dict[str, bytes] = {}
        for requirement in source.dependencies:
            beside |= read_wheel(fetch_wheel(requirement, cache))
        repository = prepare_repository(
            source, files, self._target / source.name, strip_text=False, beside=beside
        )
        return Part(repository, source.split, source.mutated_paths)


class _Progress:
    """Candidates judged so far, for whoever watches."""

    def __init__(self, workspace: Workspace, parts: list[Part], config: ProblemSetConfig) -> None:
        self._writer = workspace.progress
        quotas = config.quotas
        each = sum(quotas.of(kind) for kind in Kind if kind is not Kind.MINED_COMMIT)
        self._wanted = sum(len(part.mined) or each for part in parts)
        self._num_proven = 0
        self._num_judged = 0
        self._name = ""

    def show(self, name: str) -> None:
        """Another repository began."""
        self._name = name
        self._update()

    def judged(self, finding: Finding) -> None:
        """One more candidate is judged."""
        self._num_judged += 1
        self._num_proven += finding is Finding.PROVEN
        self._update()

    def _update(self) -> None:
        message = f"{self._num_proven} proven of {self._num_judged} tried; {self._name}"
        done = min(self._num_proven, self._wanted - 1)
        self._writer.update(done, self._wanted, message)


def _write(target: Path, made: ProblemSet, built: list[BuiltPart], figures: dict) -> None:
    (target / PROBLEMS_FILE).write_text(
        "".join(problem.model_dump_json() + "\n" for problem in made.problems)
    )
    lines = [
        json.dumps({"repository": item.part.repository.name, **oracle.model_dump(mode="json")})
        for item in built
        for _, oracle in sorted(item.oracles.items())
    ]
    (target / ORACLES_FILE).write_text("".join(line + "\n" for line in lines))
    (target / STATISTICS_FILE).write_text(json.dumps(figures, indent=1, sort_keys=True))
    (target / YIELD_FILE).write_text(json.dumps(made.rows, indent=1))
