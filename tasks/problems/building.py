"""Builds problems of prepared repositories: baseline, candidates, proofs.

Candidates with a result in the repository's journal are not judged again. Proven candidates are taken in the
order of the candidates, so the result does not depend on which run ends first.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ProblemError, SandboxError
from ostinato.infra.platform.telemetry import MetricsLog, fields, read_lines
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer, VerdictCache
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank
from ostinato.tasks.problems.config import Kind, ProblemsConfig, Quotas
from ostinato.tasks.problems.proving.baseline import Baseline, measure_baseline
from ostinato.tasks.problems.proving.judging import (
    TESTED,
    ProofOutcome,
    ProofResult,
    RepositoryUnderTest,
    StubTrials,
    judge_candidate,
)
from ostinato.tasks.problems.proving.leaks import LeakCheck
from ostinato.tasks.problems.proving.oracle import oracles_of
from ostinato.tasks.problems.proving.refactorings import prove_refactoring
from ostinato.tasks.problems.proving.replies import ask_questions, judge_unbroken, leave_unbroken
from ostinato.tasks.problems.selection import (
    Place,
    Sources,
    assign_splits,
    choose_held_out_functions,
    combine,
    find_candidates,
    order_mutations,
    place_of,
)
from ostinato.tasks.records import FunctionOracle, Split

logger = logging.getLogger(__name__)

_HASH_SEEDS = (0, 1)  # of a repository's two boxes
_LIMITS = SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0)
_CONCURRENT_REPOSITORIES = 2  # so that no repository waits for the last run of another
_oracles = TypeAdapter(list[FunctionOracle])
OnJudged = Callable[[str, ProofOutcome], None]
Proven = tuple[Candidate, ProofResult]


@dataclass(frozen=True)
class Part:
    """One repository to build problems from."""

    repository: PreparedRepository
    split: Split | None
    quotas: Quotas = field(default_factory=Quotas)
    mutated_paths: tuple[str, ...] = ()
    mined: tuple[Candidate, ...] = ()
    descriptions: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class BuiltPart:
    """Proven candidates of one repository."""

    part: Part
    baseline: Baseline
    proven: list[Proven] = field(default_factory=list)
    splits: dict[str, Split] = field(default_factory=dict)
    findings: Counter[tuple[Kind, ProofOutcome]] = field(default_factory=Counter)
    oracles: dict[tuple[str, str], FunctionOracle] = field(default_factory=dict)
    decoys: dict[str, Proven] = field(default_factory=dict)  # by id


class RepositoryProver:
    """Test servers, journal and results of one repository. Files are written below `work`."""

    def __init__(
        self,
        part: Part,
        config: ProblemsConfig,
        work: Path,
        parallel_runs: int,
        on_judged: OnJudged,
    ) -> None:
        self.part = part
        self._config = config
        self._on_judged = on_judged
        self._slots = asyncio.Semaphore(2 * parallel_runs)
        self._servers = tuple(
            TestServer(
                part.repository,
                _LIMITS,
                parallel_runs=parallel_runs,
                cache=VerdictCache(capacity=1),
                hash_seed=seed,
            )
            for seed in _HASH_SEEDS
        )
        self._stub_trials = StubTrials(self._servers[0], config.rules.time_limit_seconds)
        self._leaks = LeakCheck(part.repository)
        name = part.repository.name
        journal = work / "judged" / f"{name}.jsonl"
        self._journal, self._known = MetricsLog(journal), read_journal(journal)
        self._baseline_file = work / "baselines" / f"{name}.json"
        self._oracles_file = work / "oracles" / f"{name}.json"
        for file in (self._baseline_file, self._oracles_file):
            file.parent.mkdir(parents=True, exist_ok=True)
        self._built: BuiltPart | None = None

    @property
    def built(self) -> BuiltPart:
        """Everything proven so far. Call `measure` first."""
        assert self._built is not None
        return self._built

    async def measure(self) -> None:
        """Finds the stable tests. Raises ProblemError if there are none."""
        baseline = None
        if self._baseline_file.exists():
            baseline = Baseline.model_validate_json(self._baseline_file.read_text())
        if baseline is None or baseline.fingerprint != self.part.repository.fingerprint:
            server, second = self._servers
            rules, seed = self._config.rules, self._config.seed
            baseline = await measure_baseline(server, second, rules, seed)
            replace_text(self._baseline_file, baseline.model_dump_json())
        self._built = BuiltPart(self.part, baseline)

    async def judge(self, candidate: Candidate) -> ProofResult:
        """ProofResult of a candidate, from the journal if it is there."""
        judgement = self._known.get(candidate.candidate_id)
        if judgement is None:
            async with self._slots:
                judgement = await self._judge_or_fault(candidate)
            self._known[candidate.candidate_id] = judgement
            if judgement.finding is not ProofOutcome.FAULT:
                self._journal.append(len(self._known), judgement.model_dump(mode="json"))
        self.built.findings[candidate.kind, judgement.finding] += 1
        self._on_judged(self.part.repository.name, judgement.finding)
        return judgement

    async def _judge_or_fault(self, candidate: Candidate) -> ProofResult:
        """ProofResult of a candidate. An error of the box is a FAULT, so that it does not end the build."""
        try:
            return await self._judge(candidate, self.built.baseline)
        except SandboxError as error:
            details = fields(candidate=candidate.candidate_id, error=str(error))
            logger.warning("judging failed %s", details)
            return ProofResult(
                candidate_id=candidate.candidate_id,
                finding=ProofOutcome.FAULT,
                error_type=type(error).__name__,
                error_message=str(error),
            )

    async def _judge(self, candidate: Candidate, baseline: Baseline) -> ProofResult:
        # in a thread, because reading every file would delay the runs of other candidates
        if await asyncio.to_thread(self._leaks.find, candidate.draft("")):
            return ProofResult(candidate_id=candidate.candidate_id, finding=ProofOutcome.LEAKED)
        server, second = self._servers
        under_test = RepositoryUnderTest(
            baseline, server, second, self._config.rules, self._stub_trials
        )
        if candidate.kind is Kind.REFACTORING:
            return await prove_refactoring(candidate, under_test)
        if candidate.reply is not None:
            return await judge_unbroken(candidate, under_test)
        return await judge_candidate(candidate, under_test)

    async def find_questions(self) -> list[Candidate]:
        """Questions about the repository. Empty if its quota has none, or if none can be made."""
        if not self.part.quotas.question:
            return []
        try:
            return await ask_questions(self.part.repository, self.built.baseline, self._config)
        except (ProblemError, SandboxError) as error:
            name = self.part.repository.name
            logger.warning("no questions %s", fields(repository=name, error=str(error)))
            return []

    async def load_oracles(self) -> None:
        """Loads or builds the oracles of the functions that tests call with literal arguments."""
        if not self._config.oracle.enabled or self.part.mined:
            return
        if self._oracles_file.exists():
            found = _oracles.validate_json(self._oracles_file.read_bytes())
        else:
            found = await self._build_oracles(self.built.baseline)
            replace_text(self._oracles_file, _oracles.dump_json(found).decode())
        self.built.oracles = {(item.path, item.symbol): item for item in found}

    async def _build_oracles(self, baseline: Baseline) -> list[FunctionOracle]:
        repository = self.part.repository
        definitions = Sources.read(repository).every_definition()
        try:
            return await oracles_of(
                repository, definitions, baseline, self._config.oracle, self._config.seed
            )
        except (ProblemError, SandboxError) as error:
            logger.warning("no oracles %s", fields(repository=repository.name, error=str(error)))
            return []

    async def close(self) -> None:
        self._journal.close()
        for server in self._servers:
            await server.close()


async def build_parts(
    parts: Sequence[Part],
    config: ProblemsConfig,
    work: Path,
    parallel_runs: int,
    on_judged: OnJudged = lambda name, finding: None,
) -> tuple[list[BuiltPart], dict[str, str]]:
    """Built parts, and the reason for each repository or test file (NAME/FILE) that is left out."""
    left_out: dict[str, str] = {}
    at_once = asyncio.Semaphore(_CONCURRENT_REPOSITORIES)

    async def build_group(group: Sequence[Part]) -> list[BuiltPart]:
        async with at_once, AsyncExitStack() as stack:
            provers: list[RepositoryProver] = []
            for part in group:
                name = part.repository.name
                prover = RepositoryProver(part, config, work, parallel_runs, on_judged)
                stack.push_async_callback(prover.close)
                try:
                    await prover.measure()
                except (ProblemError, SandboxError) as error:
                    left_out[name] = str(error)
                    continue
                failed = prover.built.baseline.left_out
                left_out.update({f"{name}/{file}": reason for file, reason in failed.items()})
                provers.append(prover)
            return await _build_group(provers, config)

    shared = [part for part in parts if part.split is None]
    groups = [shared] if shared else []
    groups += [[part] for part in parts if part.split is not None]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(build_group(group)) for group in groups]
    except ExceptionGroup as error:
        raise error.exceptions[0] from error
    return [built for task in running for built in task.result()], left_out


async def _build_group(
    provers: Sequence[RepositoryProver], config: ProblemsConfig
) -> list[BuiltPart]:
    """Builds repositories that share one draw of problems, or a single repository with its own split."""
    if not provers:
        return []
    oracles = asyncio.gather(*(prover.load_oracles() for prover in provers))
    try:
        if provers[0].part.split is None:
            await _prove_together(provers, config)
        else:
            await _prove_kinds(provers[0], config)
    except BaseException:
        oracles.cancel()
        raise
    await oracles
    return [prover.built for prover in provers]


async def _prove_together(provers: Sequence[RepositoryProver], config: ProblemsConfig) -> None:
    """Proves mutations of several repositories in one order, as many as the splits need."""
    by_name = {prover.part.repository.name: prover for prover in provers}
    functions: dict[Place, Callable[[], Iterable[Candidate]]] = {}
    for prover in provers:
        part = prover.part
        sources = Sources.read(part.repository, part.mutated_paths)
        found = sources.mutations_of(prover.built.baseline, config)
        if config.is_described:
            found = {place: make for place, make in found.items() if place[1:] in part.descriptions}
        functions |= found
    held_out = choose_held_out_functions(functions, config)
    ordered = await asyncio.to_thread(lambda: list(order_mutations(functions, config)))
    whole = [item for item in ordered if place_of(item) in held_out]
    rest = [item for item in ordered if place_of(item) not in held_out]
    sizes = config.sizes
    proven = await prove_enough(by_name, whole, sizes.held_out_function)
    proven += await prove_enough(by_name, rest, sizes.total - sizes.held_out_function)
    splits = assign_splits([candidate for candidate, _ in proven], held_out, config)
    for candidate, judgement in proven:
        built = by_name[candidate.repository].built
        if candidate.candidate_id in splits:
            built.proven.append((candidate, judgement))
            built.splits[candidate.candidate_id] = splits[candidate.candidate_id]
    for prover in provers:
        built = prover.built
        found = await _prove_refactorings(prover, config)
        replies = await _prove_replies(prover, built.proven, config.seed)
        others = [*found, *replies]
        dealt = assign_splits([one for one, _ in others if not one.decoy], held_out, config)
        dealt |= {one.candidate_id: built.splits[one.decoy] for one, _ in others if one.decoy}
        built.proven += [pair for pair in others if pair[0].candidate_id in dealt]
        built.splits |= dealt


async def _prove_refactorings(prover: RepositoryProver, config: ProblemsConfig) -> list[Proven]:
    """Proven refactorings of a repository that names no split, up to its quota."""
    part, wanted = prover.part, prover.part.quotas.refactoring
    if not wanted:
        return []
    quotas = Quotas(mutation=0, refactoring=wanted, trials_ratio=part.quotas.trials_ratio)
    sources = Sources.read(part.repository, part.mutated_paths)
    found = await asyncio.to_thread(find_candidates, sources, prover.built.baseline, config, quotas)
    return await prove_enough({part.repository.name: prover}, found[Kind.REFACTORING], wanted)


async def _prove_replies(
    prover: RepositoryProver, mutations: Sequence[Proven], seed: int
) -> list[Proven]:
    """Proven questions and no-edit problems of one repository, up to their quotas. No-edit problems have the prompts of
    some of the proven mutations.
    """
    part, built = prover.part, prover.built
    by_name = {part.repository.name: prover}
    built.decoys = {
        candidate.candidate_id: (candidate, judgement)
        for candidate, judgement in mutations
        if judgement.finding is ProofOutcome.PROVEN
    }
    unbroken = [leave_unbroken(*pair) for pair in built.decoys.values()]
    unbroken.sort(key=lambda item: draw_rank(f"{seed}", item.candidate_id))
    asked = await prover.find_questions()
    return [
        *await prove_enough(by_name, asked, part.quotas.question),
        *await prove_enough(by_name, unbroken, part.quotas.no_edit),
    ]


async def _prove_kinds(prover: RepositoryProver, config: ProblemsConfig) -> None:
    """Proves candidates of every kind of one repository, up to its quota. Two outcomes count towards the quota but
    are not published: a stub passes the tests, or the grader refuses the right fix. A repository with weak tests
    therefore gives fewer problems, and the other problems do not change.
    """
    part, repository, built = prover.part, prover.part.repository, prover.built
    by_name = {repository.name: prover}
    by_kind: dict[Kind, list[Proven]] = {}
    if part.mined:
        kind = part.mined[0].kind
        by_kind[kind] = await prove_enough(by_name, part.mined, len(part.mined), TESTED)
    else:
        sources = Sources.read(repository, part.mutated_paths)
        # no-edit problems need mutations, even those that are not published
        most = max(part.quotas.mutation, part.quotas.no_edit)
        quotas = part.quotas.model_copy(update={"mutation": most})
        found = await asyncio.to_thread(find_candidates, sources, built.baseline, config, quotas)
        for kind, candidates in found.items():
            candidates = _described(candidates, part, config)
            by_kind[kind] = await prove_enough(by_name, candidates, quotas.of(kind), TESTED)
        mutations = [candidate for candidate, _ in by_kind.get(Kind.MUTATION, [])]
        # if a conftest.py holds objects of the package, a fresh import needs a box of its own
        has_conftest = any(path.endswith("conftest.py") for path in repository.files)
        combined = combine(mutations, part.quotas, config.seed, same_file=not has_conftest)
        by_kind[Kind.COMBINED] = await prove_enough(by_name, combined, part.quotas.combined, TESTED)
        tested = by_kind[Kind.MUTATION]
        by_kind[Kind.MUTATION] = tested[: part.quotas.mutation]
        by_kind[Kind.QUESTION] = await _prove_replies(prover, tested, config.seed)
    built.proven = [pair for pairs in by_kind.values() for pair in pairs]
    assert part.split is not None
    known = (*built.proven, *built.decoys.values())
    built.splits = {candidate.candidate_id: part.split for candidate, _ in known}


def _described(
    candidates: Iterable[Candidate], part: Part, config: ProblemsConfig
) -> list[Candidate]:
    """The candidates. If prompts use descriptions, only those whose function has one."""
    if not config.is_described:
        return list(candidates)
    return [item for item in candidates if (item.path, item.symbol) in part.descriptions]


async def prove_enough(
    provers: Mapping[str, RepositoryProver],
    candidates: Sequence[Candidate],
    wanted: int,
    counted: frozenset[ProofOutcome] = frozenset({ProofOutcome.PROVEN}),
) -> list[Proven]:
    """The first `wanted` candidates, in order, with a finding in `counted`."""
    proven: list[Proven] = []
    position = 0
    while len(proven) < wanted and position < len(candidates):
        wave = candidates[position : position + wanted - len(proven)]
        position += len(wave)
        judged = await asyncio.gather(*(provers[item.repository].judge(item) for item in wave))
        proven += [
            (candidate, judgement)
            for candidate, judgement in zip(wave, judged, strict=True)
            if judgement.finding in counted
        ]
    return proven


def read_journal(journal: Path) -> dict[str, ProofResult]:
    """Results of an earlier, killed run, by candidate."""
    rows = ({k: v for k, v in row.items() if k != "step"} for row in read_lines(journal))
    found = map(ProofResult.model_validate, rows)
    return {judgement.candidate_id: judgement for judgement in found}
