"""Child entry of the problem stage: makes proven problems from sources, and resumes from journals after a kill."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.folders import is_below
from ostinato.infra.platform.source_archives import (
    fetch_archive,
    fetch_wheel,
    read_archive,
    read_wheel,
)
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.discovery.layout import strip_prefix
from ostinato.tasks.problems.building import Part, build_parts
from ostinato.tasks.problems.commits import mine_commits
from ostinato.tasks.problems.config import (
    GitSource,
    GivenSource,
    ProblemsConfig,
    ProblemSelection,
    ProblemsRequest,
    ProblemsResult,
    RepositorySource,
)
from ostinato.tasks.problems.descriptions import describe_functions
from ostinato.tasks.problems.given.task import prepare_given
from ostinato.tasks.problems.proving.judging import ProofOutcome
from ostinato.tasks.problems.published import (
    PROBLEMS_FILE,
    REPOSITORIES_FOLDER,
    load_problems,
    write_problems,
)
from ostinato.tasks.problems.publishing import count_published, publish, summarise
from ostinato.tasks.problems.repositories import describe_installation, prepare_repository
from ostinato.tasks.problems.shipped import check_repositories, find_set
from ostinato.tasks.records import Problem

logger = logging.getLogger(__name__)

STATISTICS_FILE = "statistics.json"


def main(request: ProblemsRequest, workspace: Workspace) -> ProblemsResult:
    """Builds the problems of a recipe, and keeps those that the recipe uses."""
    return choose_problems(build_set(request, workspace), request.selection)


def build_set(request: ProblemsRequest, workspace: Workspace) -> ProblemsResult:
    """The whole problem set of a configuration."""
    started = time.monotonic()
    target = workspace.directory / "problems"
    parts, left_out = prepare_parts(request, target / REPOSITORIES_FOLDER, workspace)
    shipped = find_set(request.config) if request.use_shipped else None
    if shipped is not None:
        card, lines = shipped
        check_repositories(
            card, {part.repository.name: part.repository.fingerprint for part in parts}
        )
        (target / PROBLEMS_FILE).write_bytes(lines)
        return card.result.model_copy(update={"directory": str(target)})
    progress = _Progress(workspace, parts, request.config)
    built, unproven = asyncio.run(
        build_parts(
            parts,
            request.config,
            workspace.directory,
            request.parallel_runs or workspace.settings.cpu_limit,
            progress.judged,
        )
    )
    left_out |= unproven
    workspace.progress.update(1, 1, "writing the problems")
    made = publish(built, request.config)
    if not made.problems:
        raise ProblemError(f"no source gave a problem, wanted one or more: {_explain(left_out)}")
    figures = summarise(made, built, left_out)
    write_problems(target, made.problems)
    (target / STATISTICS_FILE).write_text(json.dumps(figures, indent=1, sort_keys=True))
    return ProblemsResult(
        directory=str(target),
        repositories={b.part.repository.name: b.part.repository.fingerprint for b in built},
        seconds=time.monotonic() - started,
        **{name: figures[name] for name in ProblemsResult.model_fields if name in figures},
    )


def _explain(left_out: Mapping[str, str]) -> str:
    if not left_out:
        return "no function is small enough and called by a cheap stable test"
    return "\n".join(f"{name}: {reason}" for name, reason in sorted(left_out.items()))


def prepare_parts(
    request: ProblemsRequest, target: Path, workspace: Workspace
) -> tuple[list[Part], dict[str, str]]:
    """Parts of all sources, largest code first, so that the longest work does not begin last. A source
    that cannot be fetched or prepared is left out, with the reason.
    """
    parts: list[Part] = []
    left_out: dict[str, str] = {}
    config = request.config
    sources = (*config.repositories, *config.git, *config.given)
    for number, source in enumerate(sources):
        workspace.progress.update(number, len(sources), f"fetching {source.name}")
        try:
            parts += _parts_of(source, request, target, left_out)
        except (ConfigError, ProblemError) as error:
            left_out[source.name] = str(error)
            logger.warning("source left out %s", fields(name=source.name, error=str(error)))
    parts.sort(key=lambda part: -sum(map(len, part.repository.files.values())))
    return parts, left_out


def _parts_of(
    source: RepositorySource | GitSource | GivenSource,
    request: ProblemsRequest,
    target: Path,
    left_out: dict[str, str],
) -> list[Part]:
    config, cache = request.config, request.archives_directory
    installed: dict[str, bytes] = {}
    for requirement in source.dependencies:
        installed |= read_wheel(fetch_wheel(requirement, cache), is_whole=source.is_installed)
    if source.is_installed:
        installed |= describe_installation(source)
    if isinstance(source, GitSource):
        mining = mine_commits(source, target, installed)
        reasons = ", ".join(f"{n} {reason}" for reason, n in mining.refused.most_common())
        if not mining.found:
            raise ProblemError(f"no commit of {source.path} is a problem: {reasons}")
        if reasons:
            left_out[source.name] = f"{mining.refused.total()} commits: {reasons}"
        return [
            Part(item.repository, source.split, mined=(item.candidate,)) for item in mining.found
        ]
    if isinstance(source, GivenSource):
        repository, candidate = prepare_given(source, cache, target / source.name, installed)
        return [Part(repository, source.split, mined=(candidate,))]
    files = strip_prefix(read_archive(fetch_archive(source, cache)), source.stripped_prefix)
    descriptions = {
        (path, name): sentence
        for path, content in files.items()
        if config.is_described
        and path.endswith(".py")
        and is_below(path, source.mutated_paths or source.package_paths)
        for name, sentence in describe_functions(content.decode(errors="replace")).items()
    }
    repository = prepare_repository(
        source, files, target / source.name, strip_text=config.strip_text, installed=installed
    )
    return [
        Part(
            repository,
            source.split,
            quotas=source.quotas or config.quotas,
            mutated_paths=source.mutated_paths,
            descriptions=descriptions,
        )
    ]


class _Progress:
    """Progress of the stage: candidates judged so far, reported to the supervisor."""

    def __init__(self, workspace: Workspace, parts: list[Part], config: ProblemsConfig) -> None:
        self._writer = workspace.progress
        self._wanted = config.sizes.total if any(part.split is None for part in parts) else 0
        for part in parts:
            quotas = part.quotas  # mutations of shared repositories are counted by the sizes
            shared = quotas.refactoring + quotas.question + quotas.no_edit
            each = quotas.total if part.split is not None else shared
            self._wanted += len(part.mined) or each
        self._num_proven = 0
        self._num_judged = 0

    def judged(self, repository: str, finding: ProofOutcome) -> None:
        self._num_judged += 1
        self._num_proven += finding is ProofOutcome.PROVEN
        message = f"{self._num_proven} proven of {self._num_judged} tried; {repository}"
        self._writer.update(min(self._num_proven, self._wanted - 1), self._wanted, message)


def choose_problems(result: ProblemsResult, selection: ProblemSelection) -> ProblemsResult:
    """The set reduced to the problems of the selection, with their counts. Rewrites the file of the set."""
    if selection == ProblemSelection():
        return result
    directory = Path(result.directory)
    kept = [problem for problem in load_problems(directory) if _is_kept(problem, selection)]
    if not kept:
        raise ProblemError(
            f"[selection] keeps none of {result.num_problems} problems, wanted at least 1: {selection}"
        )
    write_problems(directory, kept)
    return result.model_copy(update={"num_problems": len(kept), **count_published(kept)})


def _is_kept(problem: Problem, selection: ProblemSelection) -> bool:
    has_kind = not selection.kinds or problem.kind in selection.kinds
    num_lines = problem.last_line - problem.first_line + 1
    return has_kind and (selection.max_lines is None or num_lines <= selection.max_lines)
