"""Builds one repository's part of a problem set: baseline, candidates, proofs, prompts, leaks.

The order of work in a repository and its resumption: every judgement is appended to the
repository's journal, and one found there is not made again. Which candidates become problems is
decided in candidate order, so the result does not depend on which run ends first.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.actor import ProverPool
from ostinato.tasks.problems.baseline import Baseline
from ostinato.tasks.problems.candidates import Candidate
from ostinato.tasks.problems.generation import Sources, combine, generate
from ostinato.tasks.problems.leaks import CodeNames, ReadableTree, find_leaks
from ostinato.tasks.problems.set_config import Kind, ProblemSetConfig
from ostinato.tasks.problems.validity import Finding, Judgement
from ostinato.tasks.records import FunctionOracle, Split

logger = logging.getLogger(__name__)

_BATCH = 12
_EXPECTED_YIELD = 0.75
_oracles = TypeAdapter(list[FunctionOracle])
OnJudged = Callable[[Finding], None]


@dataclass(frozen=True)
class Part:
    """One repository to build problems of."""

    repository: PreparedRepository
    split: Split
    mutated_paths: tuple[str, ...] = ()
    mined: tuple[Candidate, ...] = ()


@dataclass
class BuiltPart:
    """Problems and statistics of one repository."""

    part: Part
    baseline: Baseline
    proven: list[tuple[Candidate, Judgement]] = field(default_factory=list)
    findings: Counter[tuple[Kind, Finding]] = field(default_factory=Counter)
    oracles: dict[tuple[str, str], FunctionOracle] = field(default_factory=dict)
    seconds_in_boxes: float = 0.0


class PartBuilder:
    """Builds one part; its files lie below `work`."""

    def __init__(
        self,
        part: Part,
        config: ProblemSetConfig,
        pool: ProverPool,
        work: Path,
        on_judged: OnJudged,
    ) -> None:
        self._part = part
        self._config = config
        self._pool = pool
        self._directory = part.repository.directory.parent
        self._on_judged = on_judged
        self._journal = work / "judged" / f"{part.repository.name}.jsonl"
        self._baseline_file = work / "baselines" / f"{part.repository.name}.json"
        self._oracles_file = work / "oracles" / f"{part.repository.name}.json"
        for file in (self._journal, self._baseline_file, self._oracles_file):
            file.parent.mkdir(parents=True, exist_ok=True)
        self._known = read_journal(self._journal)

    async def build(self) -> BuiltPart:
        """Everything, or what is left of it after a kill."""
        baseline = await self._measure()
        built = BuiltPart(self._part, baseline)
        oracles = asyncio.create_task(self._load_oracles(baseline))
        try:
            await self._prove_all(built)
        except BaseException:
            oracles.cancel()
            raise
        built.oracles = {(item.path, item.symbol): item for item in await oracles}
        return built

    async def _prove_all(self, built: BuiltPart) -> None:
        # in threads: the loop that feeds the workers must not wait for them
        checked = await asyncio.to_thread(_LeakCheck, self._part.repository)
        if self._part.mined:
            built.proven = await self._prove(
                self._part.mined, len(self._part.mined), built, checked
            )
            return
        repository, mutated_paths = self._part.repository, self._part.mutated_paths
        sources = await asyncio.to_thread(Sources.read, repository, mutated_paths)
        found = await asyncio.to_thread(generate, sources, built.baseline, self._config)
        quotas = self._config.quotas
        proven = await asyncio.gather(
            *(self._prove(items, quotas.of(kind), built, checked) for kind, items in found.items())
        )
        by_kind = dict(zip(found, proven, strict=True))
        parts = [candidate for candidate, _ in by_kind[Kind.MUTATION]]
        # where a conftest.py holds objects of the package a fresh import takes a box of its own
        has_conftest = any(path.endswith("conftest.py") for path in self._part.repository.files)
        joined = combine(parts, self._config, same_file=not has_conftest)
        by_kind[Kind.COMBINED] = await self._prove(joined, quotas.combined, built, checked)
        built.proven = [pair for pairs in by_kind.values() for pair in pairs]

    async def _measure(self) -> Baseline:
        if self._baseline_file.exists():
            known = Baseline.model_validate_json(self._baseline_file.read_text())
            if known.fingerprint == self._part.repository.fingerprint:
                return known
        found: Baseline = await self._pool.run("measure", self._directory)
        replace_text(self._baseline_file, found.model_dump_json())
        logger.info("baseline %s", fields(repository=found.repository, tests=len(found.tests)))
        return found

    async def _load_oracles(self, baseline: Baseline) -> list[FunctionOracle]:
        if not self._config.oracle.enabled or self._part.mined:
            return []
        if self._oracles_file.exists():
            return _oracles.validate_json(self._oracles_file.read_bytes())
        try:
            found: list[FunctionOracle] = await self._pool.run(
                "build_oracles", self._directory, baseline, self._config.oracle
            )
        except ProblemError as error:
            logger.warning(
                "no oracles %s", fields(repository=baseline.repository, error=str(error))
            )
            found = []
        replace_text(self._oracles_file, _oracles.dump_json(found).decode())
        return found

    async def _prove(
        self, candidates: Sequence[Candidate], wanted: int, built: BuiltPart, check: "_LeakCheck"
    ) -> list[tuple[Candidate, Judgement]]:
        """The first `wanted` candidates, in order, that are proven."""
        proven: list[tuple[Candidate, Judgement]] = []
        position = 0
        while len(proven) < wanted and position < len(candidates):
            missing = int((wanted - len(proven)) / _EXPECTED_YIELD) + 1
            wave = candidates[position : position + missing]
            position += len(wave)
            batches = [wave[start : start + _BATCH] for start in range(0, len(wave), _BATCH)]
            done = await asyncio.gather(
                *(self._judge(batch, built.baseline, check) for batch in batches)
            )
            for candidate, judgement in zip(
                wave, [j for group in done for j in group], strict=True
            ):
                built.findings[candidate.kind, judgement.finding] += 1
                built.seconds_in_boxes += judgement.seconds
                if judgement.finding is Finding.PROVEN:
                    proven.append((candidate, judgement))
        return proven[:wanted]

    async def _judge(
        self, batch: Sequence[Candidate], baseline: Baseline, check: "_LeakCheck"
    ) -> list[Judgement]:
        unknown = [item for item in batch if item.candidate_id not in self._known]
        clean = [item for item in unknown if not check.leaks(item)]
        names = {item.candidate_id for item in clean}
        made = [
            Judgement(candidate_id=item.candidate_id, finding=Finding.LEAKED)
            for item in unknown
            if item.candidate_id not in names
        ]
        if clean:
            made += await self._pool.run("judge", self._directory, baseline, clean)
        with self._journal.open("a") as file:
            for judgement in made:
                self._known[judgement.candidate_id] = judgement
                file.write(judgement.model_dump_json() + "\n")
        found = [self._known[item.candidate_id] for item in batch]
        for judgement in found:
            self._on_judged(judgement.finding)
        return found


class _LeakCheck:
    """Search of a repository for code that a candidate removes."""

    def __init__(self, repository: PreparedRepository) -> None:
        self._repository = repository
        self._files = read_everything(repository.directory)
        self._tree = ReadableTree(self._files)
        self._names = CodeNames(self._files)

    def leaks(self, candidate: Candidate) -> bool:
        """True when it must not be published."""
        draft = candidate.draft(self._repository.fingerprint)
        if candidate.kind is Kind.MINED_COMMIT or not draft.blocks:
            return False  # old code stands where new code was; single lines are no run of lines
        return bool(find_leaks(draft, self._repository.files, self._tree, self._names))


def read_everything(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, caches and bytecode included."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def read_journal(journal: Path) -> dict[str, Judgement]:
    """Judgements of an earlier, killed run. A last line that was cut off is left out."""
    if not journal.exists():
        return {}
    text = journal.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:
        replace_text(journal, whole + "\n" if whole else "")
    try:
        found = [Judgement.model_validate_json(line) for line in whole.splitlines()]
    except ValidationError as error:
        raise ProblemError(
            f"journal {journal} holds a bad line; delete the file: {error}"
        ) from error
    return {judgement.candidate_id: judgement for judgement in found}
