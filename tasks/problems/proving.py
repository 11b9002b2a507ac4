"""Proves that a mutation is a bug: named tests fail with it and others still pass, twice, and all
pass without it.

The gold state was proven by the test map: only tests that passed it twice are used here.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.coverage import TestMap
from ostinato.tasks.problems.mutations import Mutation


class ProofOutcome(StrEnum):
    """Outcome of proving a candidate."""

    PROVEN = "proven"
    SURVIVED = "survived"  # no test notices it
    TIMEOUT = "timeout"  # a test hangs: dear to run and cheap to notice
    BREAKS_IMPORT = "breaks_import"  # everything fails
    UNSTABLE = "unstable"  # the second run differed
    UNTESTED = "untested"  # no cheap stable test calls the function


class Proof(BaseModel):
    """One candidate's result; one line of proven.jsonl."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate_id: str
    outcome: ProofOutcome
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    error_type: str = Field(default="", description="exception of the first failing test")


async def prove(
    candidate_id: str,
    mutation: Mutation,
    test_map: TestMap,
    server: TestServer,
    config: ProblemsConfig,
) -> Proof:
    """Run the candidate's tests, choose few of them, and run those again."""
    tests = test_map.tests_for(mutation.function, config.max_tests_per_candidate)
    if not tests:
        return Proof(candidate_id=candidate_id, outcome=ProofOutcome.UNTESTED)
    neighbours = test_map.neighbours(tests, mutation.function)[:1]
    files = {mutation.function.path: broken_file(mutation, server)}
    report = await server.run(files, (*tests, *neighbours), config.time_limit_seconds)
    reason = _reject(report)
    if reason is not None:
        return Proof(candidate_id=candidate_id, outcome=reason)
    failing = tuple(test for test in tests if test not in report.passed_ids)
    passing = tuple(test for test in (*tests, *neighbours) if test in report.passed_ids)
    room = config.max_tests_per_problem - min(1, len(passing))
    fail_to_pass = failing[:room]
    pass_to_pass = passing[: config.max_tests_per_problem - len(fail_to_pass)]
    again = await server.run_again(
        files,
        (*fail_to_pass, *pass_to_pass),
        config.time_limit_seconds,
        cold=_is_checked_cold(candidate_id),
    )
    if again.passed_ids != frozenset(pass_to_pass) or _reject(again) is not None:
        return Proof(candidate_id=candidate_id, outcome=ProofOutcome.UNSTABLE)
    return Proof(
        candidate_id=candidate_id,
        outcome=ProofOutcome.PROVEN,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        error_type=report.first_failure.error_type if report.first_failure else "",
    )


def _is_checked_cold(candidate_id: str) -> bool:
    """One candidate in eight, by its hash: a fresh import costs twice what swapped code does."""
    return int(candidate_id[-1], 16) % 8 == 0


def broken_file(mutation: Mutation, server: TestServer) -> bytes:
    """The whole file with the mutation."""
    lines = server.repository.files[mutation.function.path].decode().split("\n")
    lines[mutation.line_number - 1] = mutation.broken_text
    return "\n".join(lines).encode()


def _reject(report: TestReport) -> ProofOutcome | None:
    outcomes = list(report.outcomes.values())
    if TestOutcome.TIMEOUT in outcomes or TestOutcome.MISSING in outcomes:
        return ProofOutcome.TIMEOUT
    if report.tampering or TestOutcome.PASSED not in outcomes:
        return ProofOutcome.BREAKS_IMPORT
    if all(outcome is TestOutcome.PASSED for outcome in outcomes):
        return ProofOutcome.SURVIVED
    return None
