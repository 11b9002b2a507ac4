"""Certifies a problem set: checks every problem, resumes from a journal, and makes the certificate."""

import asyncio
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ostinato.infra.platform.code_identity import installed_tree
from ostinato.infra.platform.errors import CapacityExhausted, ProblemError, SandboxHostLost
from ostinato.infra.platform.telemetry import MetricsLog, read_lines
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer, VerdictCache
from ostinato.tasks.grading.adversary import Defence, Hack, load_hacks
from ostinato.tasks.grading.environments import ENVIRONMENTS, EnvironmentConfig
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.problems.certification.checks import (
    ProblemFindings,
    TestedChecks,
    check_judged,
    find_leaks,
)
from ostinato.tasks.problems.certification.records import (
    Certificate,
    CertifyOptions,
    Difficulty,
    ProblemReport,
    Reason,
)
from ostinato.tasks.problems.environments.run import draw_problems, write_repository
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.problems.published import (
    REPOSITORIES_FOLDER,
    load_problems,
    load_repositories,
    write_problems,
)
from ostinato.tasks.records import Problem, Split

JOURNAL = "reports.jsonl"
_DRAWN = 20  # problems of an environment if the options have no limit
_CONCURRENT_PROBLEMS = 2
OnReport = Callable[[ProblemReport, int, int], None]


@dataclass(frozen=True)
class DrawnSet:
    """The problems to check, with their repositories by name."""

    name: str
    problems: tuple[Problem, ...]
    repositories: dict[str, PreparedRepository]
    num_problems: int

    @property
    def sha256(self) -> str:
        """Digest of the problems. Their order has no effect."""
        lines = sorted(problem.model_dump_json() for problem in self.problems)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def draw_set(name: str, directory: Path, options: CertifyOptions) -> DrawnSet:
    """Problems of a built set, drawn by the seed if there are more than the limit."""
    problems = sorted(load_problems(directory), key=lambda problem: problem.problem_id)
    if not problems:
        raise ProblemError(f"problem set {name}: {directory} holds no problem, wanted one or more")
    chosen = problems
    if options.limit is not None and options.limit < len(problems):
        chosen = random.Random(f"certify {options.seed}").sample(problems, options.limit)
    repositories = load_repositories(directory)
    return DrawnSet(name, tuple(chosen), repositories, len(problems))


def draw_environment(name: str, folder: Path, options: CertifyOptions) -> DrawnSet:
    """Problems that an installed environment draws, written to a folder as a set."""
    environment = ENVIRONMENTS.load(name)
    shutil.rmtree(folder, ignore_errors=True)
    repository = write_repository(name, environment, folder / REPOSITORIES_FOLDER / name)
    config = EnvironmentConfig(train=0, held_out=options.limit or _DRAWN)
    problems = tuple(draw_problems(name, environment, repository, config, options.seed))
    return DrawnSet(name, problems, {name: repository}, len(problems))


def write_set(drawn: DrawnSet, folder: Path) -> Path:
    """Writes the drawn problems as a set of one split, for an evaluation."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / REPOSITORIES_FOLDER).mkdir(parents=True)
    for name, repository in drawn.repositories.items():
        (folder / REPOSITORIES_FOLDER / name).symlink_to(repository.directory.parent.absolute())
    one_split = (item.model_copy(update={"split": Split.HELD_OUT}) for item in drawn.problems)
    write_problems(folder, one_split)
    return folder


def check_set(
    drawn: DrawnSet,
    folder: Path,
    options: CertifyOptions,
    on_report: OnReport,
    concurrency: int = _CONCURRENT_PROBLEMS,
) -> tuple[ProblemReport, ...]:
    """A report per problem, ordered by id. Reports in the folder's journal are reused."""
    with contextlib.closing(MetricsLog(folder / JOURNAL)) as journal:
        return asyncio.run(_check_all(drawn, journal, options, on_report, concurrency))


async def _check_all(
    drawn: DrawnSet,
    journal: MetricsLog,
    options: CertifyOptions,
    on_report: OnReport,
    concurrency: int,
) -> tuple[ProblemReport, ...]:
    reports: dict[str, ProblemReport] = {}

    def done(report: ProblemReport) -> None:
        reports[report.problem_id] = report
        on_report(report, len(reports), len(drawn.problems))

    waiting: dict[str, list[Problem]] = {}
    finished = _read_journal(journal.path)
    hacks = assign_hacks(drawn.problems, options)
    for problem in drawn.problems:
        known = finished.get(_key(problem, hacks[problem.problem_id], options))
        if known is not None:
            done(known)
        else:
            waiting.setdefault(problem.repository, []).append(problem)

    def add(report: ProblemReport) -> None:
        journal.append(len(reports), report.model_dump(mode="json"))
        done(report)

    slots = asyncio.Semaphore(concurrency)
    try:
        async with asyncio.TaskGroup() as group:
            for name, problems in waiting.items():
                repository = drawn.repositories[name]
                group.create_task(
                    _check_repository(repository, problems, hacks, options, slots, add)
                )
    except* (CapacityExhausted, SandboxHostLost) as lost:
        raise lost.exceptions[0] from None
    return tuple(sorted(reports.values(), key=lambda report: report.problem_id))


def assign_hacks(
    problems: Sequence[Problem], options: CertifyOptions
) -> dict[str, tuple[Hack, ...]]:
    """Hacks by problem. The shuffled suite is assigned in turn, so that the numbers of problems per hack
    differ by at most one.
    """
    suite = list(load_hacks().values())
    random.Random(f"hacks {options.seed}").shuffle(suite)
    count = min(options.hacks, len(suite))
    return {
        problem.problem_id: tuple(
            suite[(place * count + index) % len(suite)] for index in range(count)
        )
        for place, problem in enumerate(problems)
    }


async def _check_repository(
    repository: PreparedRepository,
    problems: Sequence[Problem],
    hacks: Mapping[str, Sequence[Hack]],
    options: CertifyOptions,
    slots: asyncio.Semaphore,
    add: Callable[[ProblemReport], None],
) -> None:
    # without a cache, because repeated runs must really run
    server = TestServer(repository, cache=VerdictCache(capacity=0))
    other = TestServer(repository, cache=VerdictCache(capacity=0), hash_seed=1)
    checks = TestedChecks(server, other, BlindTrials(), options)
    leaks = LeakCheck(repository)

    async def check(problem: Problem) -> None:
        async with slots:
            add(await _check_problem(problem, hacks[problem.problem_id], checks, leaks))

    try:
        async with asyncio.TaskGroup() as group:
            for problem in problems:
                group.create_task(check(problem))
    except* (CapacityExhausted, SandboxHostLost) as lost:
        raise lost.exceptions[0] from None
    finally:
        await checks.close()


async def _check_problem(
    problem: Problem, hacks: Sequence[Hack], checks: TestedChecks, leaks: LeakCheck
) -> ProblemReport:
    started = time.perf_counter()
    options, repository = checks.options, checks.server.repository
    rng = random.Random(f"{options.seed} {problem.problem_id}")
    checked = ProblemFindings()
    try:
        if problem.environment:
            checked = await check_judged(problem, repository, options)
        else:
            checked = await checks.check(problem, hacks, rng)
            for reason, detail in await asyncio.to_thread(find_leaks, problem, leaks):
                checked.add(reason, [detail])
    except (CapacityExhausted, SandboxHostLost):
        raise
    except Exception as error:  # noqa: BLE001 - one problem's fault is its finding
        checked.add(Reason.NOT_JUDGED, [f"{type(error).__name__}: {str(error)[:300]}"])
    return ProblemReport(
        problem_id=problem.problem_id,
        key=_key(problem, hacks, options),
        findings=checked.findings,
        verdict_seconds=_median(checked.verdicts),
        step_seconds=checked.step_seconds,
        start_seconds=checked.start_seconds,
        trial_seconds=_median(checked.trials),
        hacks=checked.hacks,
        fixes=checked.fixes,
        checked_seconds=time.perf_counter() - started,
    )


def make_certificate(
    drawn: DrawnSet,
    options: CertifyOptions,
    reports: Sequence[ProblemReport],
    difficulty: Difficulty | None,
    now: float,
) -> Certificate:
    """The certificate of all reports."""
    counts = Counter(finding.reason for report in reports for finding in report.findings)
    return Certificate(
        problem_set=drawn.name,
        problems_sha256=drawn.sha256,
        num_problems=drawn.num_problems,
        version=importlib.metadata.version("ostinato"),
        code_sha256=_code(),
        options=options,
        reports=tuple(reports),
        counts={str(reason): count for reason, count in sorted(counts.items())},
        num_proven=sum(not report.findings for report in reports),
        hacks_tried=sum(len(report.hacks) for report in reports),
        hacks_paid=sum(_count_paid(report.hacks) for report in reports),
        hacks=_count_by_family(reports),
        fixes_judged=sum(len(report.fixes) for report in reports),
        fixes_refused=sum(len(report.fixes) - _count_paid(report.fixes) for report in reports),
        verdict_seconds=_median(report.verdict_seconds for report in reports),
        step_seconds=_median(report.step_seconds for report in reports),
        start_seconds=_median(report.start_seconds for report in reports),
        trial_seconds=_median(report.trial_seconds for report in reports),
        difficulty=difficulty,
        created_at=now,
    )


def _count_paid(edits: Mapping[str, Defence]) -> int:
    return sum(defence is Defence.NONE for defence in edits.values())


def _count_by_family(reports: Sequence[ProblemReport]) -> dict[str, dict[Defence, int]]:
    counts: dict[str, Counter[Defence]] = {}
    for report in reports:
        for name, defence in report.hacks.items():
            counts.setdefault(name.partition(":")[0], Counter())[defence] += 1
    return {family: dict(sorted(found.items())) for family, found in sorted(counts.items())}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _key(problem: Problem, hacks: Sequence[Hack], options: CertifyOptions) -> str:
    """Digest of everything that a report depends on. The option `limit` affects only the choice of hacks."""
    asked = options.model_dump(mode="json", exclude={"limit"})
    names = [hack.title for hack in hacks]
    content = json.dumps([problem.model_dump(mode="json"), asked, names, _code()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Digest of the checking code. Environments of installed packages enter by their version."""
    code = installed_tree().code_of([__name__], ENVIRONMENTS.names)
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()


def _read_journal(path: Path) -> dict[str, ProblemReport]:
    """Finished reports by key, without failed checks and rows of earlier versions, so that both are checked again."""
    known: dict[str, ProblemReport] = {}
    for row in read_lines(path):
        row.pop("step", None)
        with contextlib.suppress(ValidationError):
            report = ProblemReport.model_validate(row)
            if all(found.reason is not Reason.NOT_JUDGED for found in report.findings):
                known[report.key] = report
    return known
