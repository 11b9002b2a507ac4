"""Proves candidates of any repository: what one worker process does.

Belongs to one event loop; actor.py makes it a Ray actor.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.protocol import SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer, VerdictCache
from ostinato.tasks.problems.baseline import Baseline, measure_baseline
from ostinato.tasks.problems.candidates import Candidate
from ostinato.tasks.problems.generation import Sources
from ostinato.tasks.problems.oracle import build_oracles, record_calls
from ostinato.tasks.problems.set_config import OracleConfig, ValidityRules
from ostinato.tasks.problems.validity import Bench, Judgement, judge_candidate
from ostinato.tasks.records import FunctionOracle

_WARM_REPOSITORIES = 2
_HASH_SEED = 1  # of the second server; the first has the box's own 0
_TELLING_TESTS = 3
_LIMITS = SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0)


class Prover:
    """Judges candidates, one repository warm at a time and one more kept."""

    def __init__(self, rules: ValidityRules, seed: int) -> None:
        self._rules = rules
        self._seed = seed
        self._warm: OrderedDict[Path, tuple[TestServer, TestServer]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def measure(self, directory: Path) -> Baseline:
        """The baseline of a repository."""
        server, second = await self._servers(directory)
        return await measure_baseline(server, second, self._rules, self._seed)

    async def judge(
        self, directory: Path, baseline: Baseline, candidates: Sequence[Candidate]
    ) -> list[Judgement]:
        """Judgements in the order of the candidates."""
        server, second = await self._servers(directory)
        bench = Bench(baseline, server, second, self._rules)
        slots = asyncio.Semaphore(2)  # one runs in each server

        async def judge_one(candidate: Candidate) -> Judgement:
            async with slots:
                return await judge_candidate(candidate, bench)

        return list(await asyncio.gather(*(judge_one(item) for item in candidates)))

    async def build_oracles(
        self, directory: Path, baseline: Baseline, config: OracleConfig
    ) -> list[FunctionOracle]:
        """Oracles of the repository's functions that tests call with literal arguments."""
        repository = PreparedRepository.load(directory)
        definitions = [
            definition
            for found in Sources.read(repository).definitions.values()
            for definition in found
        ]
        tests = baseline.telling(definitions, _TELLING_TESTS)
        async with open_box(repository, limits=_LIMITS) as sandbox:
            recorded = await record_calls(sandbox, definitions, tests, config)
            return await build_oracles(sandbox, recorded, config, self._seed)

    async def close(self) -> None:
        """End all boxes."""
        while self._warm:
            _, servers = self._warm.popitem()
            for server in servers:
                await server.close()

    async def _servers(self, directory: Path) -> tuple[TestServer, TestServer]:
        async with self._lock:
            known = self._warm.get(directory)
            if known is None:
                while len(self._warm) >= _WARM_REPOSITORIES:
                    _, old = self._warm.popitem(last=False)
                    for server in old:
                        await server.close()
                repository = PreparedRepository.load(directory)
                known = self._warm[directory] = (
                    _open_server(repository, 0),
                    _open_server(repository, _HASH_SEED),
                )
            self._warm.move_to_end(directory)
            return known


def _open_server(repository: PreparedRepository, hash_seed: int) -> TestServer:
    return TestServer(
        repository,
        _LIMITS,
        parallel_runs=1,
        cache=VerdictCache(capacity=1),
        hash_seed=hash_seed,
    )
