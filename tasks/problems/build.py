"""Builds the problems of a recipe: prepare, map tests, mutate, prove, split.

The stage's main loop over one event loop and its resumption: every proof is appended to
proven.jsonl, and a proof found there is not made again. Writing the result is run.py's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer, VerdictCache
from ostinato.tasks.descriptions import write_prompt
from ostinato.tasks.problems.config import DescribedSource, ProblemsConfig, RepositorySource
from ostinato.tasks.problems.coverage import TestMap, map_tests
from ostinato.tasks.problems.descriptions import Descriptions
from ostinato.tasks.problems.functions import Function, find_functions
from ostinato.tasks.problems.mutations import Mutation, mutate_function
from ostinato.tasks.problems.proving import Proof, ProofOutcome, prove
from ostinato.tasks.problems.selection import (
    assign_splits,
    candidate_id,
    choose_held_out_functions,
    order_candidates,
)
from ostinato.tasks.records import LineEdit, Problem, Split

_logger = logging.getLogger(__name__)
OnProgress = Callable[[float, float, str], None]


@dataclass
class BuiltProblems:
    """Everything the stage publishes."""

    problems: list[Problem]
    proofs: Counter[tuple[str, ProofOutcome]] = field(default_factory=Counter)
    num_functions: int = 0
    num_raw_mutations: int = 0
    tests: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tested:
    server: TestServer
    test_map: TestMap


async def build_problems(
    repositories: Sequence[tuple[RepositorySource, PreparedRepository]],
    config: ProblemsConfig,
    journal: Path,
    on_progress: OnProgress,
    descriptions: Descriptions | None = None,
) -> BuiltProblems:
    """Problems of all splits, as many as wanted or as the repositories hold. `descriptions`: what
    the functions of described packages are for.
    """
    servers = {
        repository.name: TestServer(
            repository, parallel_runs=config.parallel_runs, cache=VerdictCache(capacity=1)
        )
        for _, repository in repositories
    }
    try:
        return await _build(repositories, servers, config, journal, on_progress, descriptions or {})
    finally:
        for server in servers.values():
            await server.close()


async def _build(
    repositories: Sequence[tuple[RepositorySource, PreparedRepository]],
    servers: dict[str, TestServer],
    config: ProblemsConfig,
    journal: Path,
    on_progress: OnProgress,
    descriptions: Descriptions,
) -> BuiltProblems:
    on_progress(0, 1, "running the pristine tests")
    maps = await asyncio.gather(*(map_tests(server, config) for server in servers.values()))
    tested = {
        name: _Tested(server, found)
        for (name, server), found in zip(servers.items(), maps, strict=True)
    }
    functions = [
        function
        for source, repository in repositories
        for function in find_functions(repository, source, config)
        if tested[repository.name].test_map.tests_for(function, 1)
    ]
    if not functions:
        names = ", ".join(servers)
        raise ProblemError(
            f"no function of {names} is small enough and called by a cheap stable test"
        )
    mutations = [mutation for function in functions for mutation in mutate_function(function)]
    prover = _Prover(tested, config, journal, on_progress)
    fixed = {s.name: s.split for s, _ in repositories if isinstance(s, DescribedSource)}
    drawn = [item for item in mutations if item.function.repository not in fixed]
    held_out = choose_held_out_functions(
        [f for f in functions if f.repository not in fixed], config
    )
    proven, splits = await _prove_drawn(prover, drawn, held_out, config)
    for split in dict.fromkeys(fixed.values()):
        theirs = [
            item
            for item in mutations
            if fixed.get(item.function.repository) is split and item.function.key in descriptions
        ]
        found = await prover.prove_enough(theirs, config.sizes.of(split))
        proven += found
        splits |= {candidate_id(item): split for item in found}
    problems = [
        make_problem(
            mutation,
            prover.proofs[candidate_id(mutation)],
            tested[mutation.function.repository].server,
            splits,
            descriptions,
        )
        for mutation in proven
        if candidate_id(mutation) in splits
    ]
    return BuiltProblems(
        problems=problems,
        proofs=Counter(
            (operator, prover.proofs[name].outcome) for name, operator in prover.asked.items()
        ),
        num_functions=len(functions),
        num_raw_mutations=len(mutations),
        tests={name: found.num_tests for name, found in zip(servers, maps, strict=True)},
    )


async def _prove_drawn(
    prover: "_Prover",
    mutations: Sequence[Mutation],
    held_out: frozenset[Function],
    config: ProblemsConfig,
) -> tuple[list[Mutation], dict[str, Split]]:
    """Proven mutations of packages whose problems are dealt out to the splits."""
    if not mutations:
        return [], {}
    whole = await prover.prove_enough(
        [mutation for mutation in mutations if mutation.function in held_out],
        config.sizes.held_out_function,
    )
    rest = await prover.prove_enough(
        [mutation for mutation in mutations if mutation.function not in held_out],
        sum(config.sizes.model_dump().values()) - config.sizes.held_out_function,
    )
    proven = [*whole, *rest]
    return proven, assign_splits(proven, held_out, config)


class _Prover:
    """Proves candidates in waves, in order, so that the result does not depend on which run ends
    first.
    """

    def __init__(
        self,
        tested: dict[str, _Tested],
        config: ProblemsConfig,
        journal: Path,
        on_progress: OnProgress,
    ) -> None:
        self.proofs = _read_journal(journal)
        self._num_proven = sum(
            proof.outcome is ProofOutcome.PROVEN for proof in self.proofs.values()
        )
        self.asked: dict[str, str] = {}  # candidate -> operator
        self._tested = tested
        self._config = config
        self._journal = journal
        self._on_progress = on_progress
        self._slots = asyncio.Semaphore(2 * config.parallel_runs)

    async def prove_enough(self, mutations: Sequence[Mutation], wanted: int) -> list[Mutation]:
        """The first `wanted` candidates, in order, that are proven."""
        ordered = order_candidates(mutations, self._config)
        proven: list[Mutation] = []
        position = 0
        while len(proven) < wanted and position < len(ordered):
            # As many as are missing: the few that survive or hang are made up for in the next wave,
            # and no proof is made that nobody wants.
            wave = ordered[position : position + wanted - len(proven)]
            position += len(wave)
            results = await asyncio.gather(*(self._prove(mutation) for mutation in wave))
            proven += [
                mutation
                for mutation, proof in zip(wave, results, strict=True)
                if proof.outcome is ProofOutcome.PROVEN
            ]
        return proven[:wanted]

    async def _prove(self, mutation: Mutation) -> Proof:
        name = candidate_id(mutation)
        self.asked[name] = mutation.operator
        known = self.proofs.get(name)
        if known is not None:
            return known
        tested = self._tested[mutation.function.repository]
        async with self._slots:
            proof = await prove(name, mutation, tested.test_map, tested.server, self._config)
        self.proofs[name] = proof
        with self._journal.open("a") as file:
            file.write(proof.model_dump_json() + "\n")
        total = sum(self._config.sizes.model_dump().values())
        self._num_proven += proof.outcome is ProofOutcome.PROVEN
        self._on_progress(min(self._num_proven, total), total, "proving problems in the sandbox")
        return proof


def _read_journal(journal: Path) -> dict[str, Proof]:
    """Proofs of an earlier, killed run. A last line that was cut off is left out."""
    proofs: dict[str, Proof] = {}
    if not journal.exists():
        return proofs
    text = journal.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:
        journal.write_text(whole + "\n" if whole else "")
    for line in whole.splitlines():
        try:
            proof = Proof.model_validate_json(line)
        except ValidationError as error:
            raise ProblemError(
                f"journal {journal} holds a bad line {line[:120]!r}; delete the file: {error}"
            ) from error
        proofs[proof.candidate_id] = proof
    return proofs


def make_problem(
    mutation: Mutation,
    proof: Proof,
    server: TestServer,
    splits: Mapping[str, Split],
    descriptions: Descriptions,
) -> Problem:
    """The record of a proven mutation; a described function is not named to the agent."""
    function = mutation.function
    description = descriptions.get(function.key)
    prompt = (
        f"Fix {function.name} in {function.path}"
        if description is None
        else write_prompt(function.repository, description)
    )
    return Problem(
        problem_id=proof.candidate_id,
        repository=function.repository,
        repository_fingerprint=server.repository.fingerprint,
        kind="mutation",
        operator=mutation.operator,
        path=function.path,
        symbol=function.name,
        first_line=function.first_line,
        last_line=function.last_line,
        prompt=prompt,
        edits=(
            LineEdit(
                path=function.path,
                line_number=mutation.line_number,
                gold_text=mutation.gold_text,
                broken_text=mutation.broken_text,
            ),
        ),
        fail_to_pass=proof.fail_to_pass,
        pass_to_pass=proof.pass_to_pass,
        split=splits[proof.candidate_id],
    )
