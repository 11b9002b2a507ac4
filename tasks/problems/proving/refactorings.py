"""Proof of a refactoring: the original's tests fail in the broken state, and those adapted to it all pass there."""

import random

from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.proving.judging import (
    ProofOutcome,
    ProofResult,
    RepositoryUnderTest,
    choose_covering,
    choose_guards,
    refuse_right_fix,
    try_cheats,
)

_SUITE_LIMITS = 6.0  # time for the whole suite, in limits of one run


async def prove_refactoring(candidate: Candidate, under_test: RepositoryUnderTest) -> ProofResult:
    """ProofResult of one candidate. Tests that cannot be imported fail, because they import the new name."""
    name, baseline, rules = candidate.candidate_id, under_test.baseline, under_test.rules
    server, limit_seconds = under_test.server, rules.time_limit_seconds
    if not 1 <= candidate.draft("").num_changed_lines <= rules.max_changed_lines:
        return ProofResult(candidate_id=name, finding=ProofOutcome.WRONG_SIZE)
    covering = baseline.tests_covering(candidate.touched, candidate.test_files)
    if not covering:
        return ProofResult(candidate_id=name, finding=ProofOutcome.UNTESTED)
    broken = candidate.broken_files(server.repository.files)
    chosen = choose_covering(candidate, covering, under_test)
    positions = (*chosen, *choose_guards(candidate, covering, baseline))
    tests = tuple(baseline.tests[position] for position in positions)
    report = await server.run(broken, tests, limit_seconds)
    failing = [test for test in tests if test not in report.passed_ids][: rules.max_fail_to_pass]
    passing = [test for test in tests if test in report.passed_ids][: rules.max_pass_to_pass]

    def end(finding: ProofOutcome, message: str = "") -> ProofResult:
        return ProofResult(
            candidate_id=name,
            finding=finding,
            fail_to_pass=tuple(failing),
            pass_to_pass=tuple(passing),
            error_message=message,
            seconds=report.cpu_seconds,
        )

    if report.tampering or TestOutcome.TIMEOUT in report.outcomes.values():
        return end(ProofOutcome.TIMEOUT)
    if not failing:
        return end(ProofOutcome.SURVIVED)
    again = [*failing, *passing]
    random.Random(f"second {name}").shuffle(again)
    second = await under_test.second.run_again(broken, again, limit_seconds)
    if second.tampering or second.passed_ids != frozenset(passing):
        return end(ProofOutcome.UNSTABLE)
    seen = {**server.repository.files, **broken}
    suite = await server.run_visible(broken, seen, baseline.tests, _SUITE_LIMITS * limit_seconds)
    if suite.tampering or suite.passed_ids != frozenset(baseline.tests):
        lost = sorted(frozenset(baseline.tests) - suite.passed_ids)
        return end(ProofOutcome.NOT_EQUIVALENT, ", ".join(lost[:3]))
    finding = await try_cheats(candidate, broken, failing, under_test)
    tried = {"fail_to_pass": tuple(failing), "pass_to_pass": tuple(passing)}
    problem = candidate.draft(baseline.fingerprint).model_copy(update=tried)
    if finding is ProofOutcome.PROVEN and rules.tries_stubs:
        is_passed = await under_test.stub_trials.is_passed(problem)
        finding = ProofOutcome.STUB_PASSES if is_passed else finding
    refused = ""
    if finding is ProofOutcome.PROVEN and rules.tries_right_fix:
        refused = await refuse_right_fix(problem, under_test)
        finding = ProofOutcome.RIGHT_FIX_REFUSED if refused else finding
    return end(finding, refused)
