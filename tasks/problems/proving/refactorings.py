"""Proof of a refactoring: the original's tests fail in the broken state, and those adapted to it all pass there."""

import random

from ostinato.infra.sandbox.protocol import TestOutcome
from ostinato.tasks.grading.judging.other_code import SUITE_LIMITS
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.proving.judging import (
    ProofOutcome,
    ProofResult,
    RepositoryUnderTest,
    choose_covering,
    refuse_right_fix,
    try_cheats,
)


async def prove_refactoring(candidate: Candidate, under_test: RepositoryUnderTest) -> ProofResult:
    """ProofResult of one candidate. Tests that cannot be imported fail, because they import the new name. There are no
    passing tests to keep, because every verdict runs the whole suite.
    """
    name, baseline, rules = candidate.candidate_id, under_test.baseline, under_test.rules
    server, limit_seconds = under_test.server, rules.time_limit_seconds
    if not 1 <= candidate.draft("").num_changed_lines <= rules.max_changed_lines:
        return ProofResult(candidate_id=name, finding=ProofOutcome.WRONG_SIZE)
    covering = baseline.tests_covering(candidate.touched, candidate.test_files)
    if not covering:
        return ProofResult(candidate_id=name, finding=ProofOutcome.UNTESTED)
    broken = candidate.broken_files(server.repository.files)
    by_file: dict[str, list[str]] = {}
    for position in choose_covering(candidate, covering, under_test):
        test = baseline.tests[position]
        by_file.setdefault(test.partition("::")[0], []).append(test)
    # a file that cannot be imported takes the tests of other files in its run along
    reports = [await server.run(broken, tests, limit_seconds) for tests in by_file.values()]
    failed = [t for report in reports for t in report.outcomes if t not in report.passed_ids]
    failing = tuple(failed[: rules.max_fail_to_pass])

    def end(finding: ProofOutcome, message: str = "") -> ProofResult:
        return ProofResult(
            candidate_id=name,
            finding=finding,
            fail_to_pass=failing,
            error_message=message,
            seconds=sum(report.cpu_seconds for report in reports),
        )

    if any(it.tampering or TestOutcome.TIMEOUT in it.outcomes.values() for it in reports):
        return end(ProofOutcome.TIMEOUT)
    if not failing:
        return end(ProofOutcome.SURVIVED)
    again = [*failing]
    random.Random(f"second {name}").shuffle(again)
    second = await under_test.second.run_again(broken, again, limit_seconds)
    if second.tampering or second.passed_ids:
        return end(ProofOutcome.UNSTABLE)
    seen = {**server.repository.files, **broken}
    suite = await server.run_visible(broken, seen, baseline.tests, SUITE_LIMITS * limit_seconds)
    if suite.tampering or suite.passed_ids != frozenset(baseline.tests):
        lost = sorted(frozenset(baseline.tests) - suite.passed_ids)
        return end(ProofOutcome.NOT_EQUIVALENT, ", ".join(lost[:3]))
    finding = await try_cheats(candidate, broken, failing, under_test)
    draft = candidate.draft(baseline.fingerprint)
    problem = draft.model_copy(update={"fail_to_pass": failing})
    if finding is ProofOutcome.PROVEN and rules.tries_stubs:
        is_passed = await under_test.stub_trials.is_passed(problem)
        finding = ProofOutcome.STUB_PASSES if is_passed else finding
    refused = ""
    if finding is ProofOutcome.PROVEN and rules.tries_right_fix:
        refused = await refuse_right_fix(problem, under_test)
        finding = ProofOutcome.RIGHT_FIX_REFUSED if refused else finding
    return end(finding, refused)
