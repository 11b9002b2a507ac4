"""Judges broken states: some tests fail in two runs, others pass in both, cheats pass nothing, and the grader accepts
a right fix.

Only tests that call a changed function run, and one test of every test file, to detect a broken import.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.record import Record
from ostinato.infra.sandbox.protocol import TestOutcome, TestReport
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.cheating.stubs import stub_fixes
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.other_code import SUITE_LIMITS
from ostinato.tasks.grading.judging.verdicts import fail_for_fault, judge
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, ValidityRules
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.records import Problem


class StubTrials:
    """Stubs of one repository's functions, and the tests that each stub is known to fail.

    A stub replaces the whole body of a function, so it fails the same tests for every problem in that function.
    The failures are kept, and a stub runs for a problem only if it is not known to fail one of its tests.
    """

    def __init__(self, server: TestServer, time_limit_seconds: float) -> None:
        self._server = server
        self._time_limit_seconds = time_limit_seconds
        self._failed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    async def is_passed(self, problem: Problem) -> bool:
        """Whether any stub passes all tests of a problem, in which case the tests prove nothing."""
        tests = (*problem.fail_to_pass, *problem.pass_to_pass)
        for name, files in stub_fixes(problem, self._server.repository).items():
            failed = self._failed[_place_of(problem), name]
            if not failed.isdisjoint(tests):
                continue
            for batch in (tests[:1], tests):
                report = await self._server.run(files, batch, self._time_limit_seconds)
                if not report.passed:
                    failed.update(test for test in batch if test not in report.passed_ids)
                    break
            else:
                return True
        return False


def _place_of(problem: Problem) -> str:
    """Key of the function if nothing else is broken, else the id of the problem."""
    lines = [(edit.path, edit.line_number, edit.line_number) for edit in problem.edits]
    lines += [
        (block.path, block.first_line, block.first_line + len(block.gold_lines) - 1)
        for block in problem.blocks
    ]
    is_inside = all(
        path == problem.path and problem.first_line <= first and last <= problem.last_line
        for path, first, last in lines
    )
    return f"{problem.path}::{problem.symbol}" if is_inside else problem.problem_id


# a function without its body raises in every test that calls it, even if the test ignores its result
_WITHOUT_BODY = (Kind.DELETED_FUNCTION, Kind.DELETED_FEATURE, Kind.MINED_COMMIT, Kind.GIVEN)
_SKIP_EVERYTHING = b"import pytest\npytest.skip('nothing to see', allow_module_level=True)\n"


class ProofOutcome(StrEnum):
    """Results of judging a candidate."""

    PROVEN = "proven"
    UNTESTED = "untested"  # no stable test calls the changed functions
    SURVIVED = "survived"  # no test fails
    TOO_BROAD = "too_broad"  # too large a share of all tests fails
    NOTHING_PASSES = "nothing_passes"  # no covering or neighbouring test passes
    TIMEOUT = "timeout"  # a test hangs or ends the process
    BREAKS_IMPORT = "breaks_import"  # a test file cannot be collected
    UNSTABLE = "unstable"  # the second run differed
    LEAKED = "leaked"  # the removed code can be read elsewhere
    WRONG_SIZE = "wrong_size"  # too few or too many changed lines
    NOT_AS_NAMED = "not_as_named"  # a test that a given task names is not stable, or does not fail
    CHEATED = "cheated"  # a patch that skips or deletes tests was not judged a failure
    BREAKS_OTHERS = "breaks_others"  # a test that calls nothing of a large deletion fails
    PLACE_UNTESTED = "place_untested"  # the tests pass if only one of several places is broken
    STUB_PASSES = "stub_passes"  # the tests pass with a constant in place of the function
    NOT_EQUIVALENT = (
        "not_equivalent"  # a refactoring's broken state fails a test that uses the old name
    )
    RIGHT_FIX_REFUSED = "right_fix_refused"  # the grader refuses the original with a comment
    FAULT = "fault"  # the box failed; not in the journal, so that another build judges it again


# outcomes in which the tests tell the broken state from the original
TESTED = frozenset({ProofOutcome.PROVEN, ProofOutcome.STUB_PASSES, ProofOutcome.RIGHT_FIX_REFUSED})


class ProofResult(Record):
    """Result of one candidate, one line of the journal."""

    candidate_id: str
    finding: ProofOutcome
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    error_type: str = Field(default="", description="exception of the first failing test")
    error_message: str = Field(
        default="", description="message of that test, of a fault, or of the grader's refusal"
    )
    seconds: float = Field(default=0.0, description="seconds of test runs in the box")


@dataclass(frozen=True)
class RepositoryUnderTest:
    """Test servers and baseline of one repository."""

    baseline: Baseline
    server: TestServer
    second: TestServer  # another box with another hash seed
    rules: ValidityRules
    stub_trials: StubTrials


async def judge_candidate(candidate: Candidate, under_test: RepositoryUnderTest) -> ProofResult:
    """ProofResult of one candidate, after all runs."""
    name, baseline = candidate.candidate_id, under_test.baseline
    if not 1 <= candidate.draft("").num_changed_lines <= under_test.rules.max_changed_lines:
        return ProofResult(candidate_id=name, finding=ProofOutcome.WRONG_SIZE)
    covering = baseline.tests_covering(candidate.touched, candidate.test_files)
    if not covering:
        return ProofResult(candidate_id=name, finding=ProofOutcome.UNTESTED)
    if candidate.named_failing:
        chosen, guards = _named(candidate, baseline)
        if len(chosen) < len(candidate.named_failing):
            return ProofResult(candidate_id=name, finding=ProofOutcome.NOT_AS_NAMED)
        covering = chosen
    else:
        chosen = choose_covering(candidate, covering, under_test)
        guards = _guards(candidate, covering, baseline)
    files = candidate.broken_files(under_test.server.repository.files)
    tests = tuple(baseline.tests[position] for position in (*chosen, *guards))
    report, refusal = await _first_run(files, tests, under_test)
    failing = [position for position in chosen if baseline.tests[position] not in report.passed_ids]
    passing = [position for position in (*chosen, *guards) if position not in frozenset(failing)]
    if refusal is None and candidate.named_failing and len(failing) < len(chosen):
        refusal = ProofOutcome.NOT_AS_NAMED
    if refusal is None:
        num_failing = round(len(failing) / len(chosen) * len(covering))
        refusal = _refuse_extent(num_failing, passing, under_test)
    if refusal is None and candidate.kind is Kind.MULTI_PLACE:
        failing = await _order_by_place(candidate, failing, under_test)
        refusal = None if failing else ProofOutcome.PLACE_UNTESTED
    if refusal is None and candidate.is_large_deletion:
        refusal = await _run_others(files, covering, under_test)
    if refusal is not None:
        return ProofResult(candidate_id=name, finding=refusal, seconds=report.cpu_seconds)
    fail_to_pass = tuple(baseline.tests[p] for p in failing[: under_test.rules.max_fail_to_pass])
    pass_to_pass = tuple(baseline.tests[p] for p in passing[: under_test.rules.max_pass_to_pass])
    finding = await _second_run(candidate, files, fail_to_pass, pass_to_pass, under_test)
    if finding is ProofOutcome.PROVEN:
        finding = await try_cheats(candidate, files, fail_to_pass, under_test)
    drawn = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass}
    problem = candidate.draft(baseline.fingerprint).model_copy(update=drawn)
    is_tried = candidate.kind in _WITHOUT_BODY or under_test.rules.tries_stubs
    stubs, failure, refused = under_test.stub_trials, report.first_failure, ""
    if finding is ProofOutcome.PROVEN and is_tried and await stubs.is_passed(problem):
        finding = ProofOutcome.STUB_PASSES
    if finding is ProofOutcome.PROVEN and under_test.rules.tries_right_fix:
        refused = await refuse_right_fix(problem, under_test)
        finding = ProofOutcome.RIGHT_FIX_REFUSED if refused else finding
    if finding not in TESTED:
        return ProofResult(candidate_id=name, finding=finding, seconds=report.cpu_seconds)
    return ProofResult(
        candidate_id=name,
        finding=finding,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        error_type=failure.error_type if failure else "",
        error_message=refused or (failure.message if failure else ""),
        seconds=report.cpu_seconds,
    )


def _refuse_extent(
    num_failing: int, passing: Sequence[int], under_test: RepositoryUnderTest
) -> ProofOutcome | None:
    """ProofOutcome for too few or too many failing tests. `num_failing`: estimate over all covering tests."""
    if num_failing == 0:
        return ProofOutcome.SURVIVED
    if num_failing > max(1, under_test.rules.max_failing_ratio * len(under_test.baseline.tests)):
        return ProofOutcome.TOO_BROAD
    return None if passing else ProofOutcome.NOTHING_PASSES


async def _order_by_place(
    candidate: Candidate, failing: Sequence[int], under_test: RepositoryUnderTest
) -> list[int]:
    """Failing tests, first one for each place that fails if only this place is broken. Empty: a place has none, so that
    a repair of the others would pass.
    """
    tests, server = under_test.baseline.tests, under_test.server
    names, first = [tests[position] for position in failing], list[int]()
    for edit in candidate.edits:
        alone = candidate.model_copy(update={"edits": (edit,)})
        files = alone.broken_files(server.repository.files)
        report = await server.run(files, names, under_test.rules.time_limit_seconds)
        noticing = [position for position in failing if tests[position] not in report.passed_ids]
        if not noticing:
            return []
        first.append(noticing[0])
    return list(dict.fromkeys((*first, *failing)))


async def _run_others(
    files: dict[str, bytes], covering: Sequence[int], under_test: RepositoryUnderTest
) -> ProofOutcome | None:
    """BREAKS_OTHERS if a stable test that calls no changed function fails."""
    known, tests = frozenset(covering), under_test.baseline.tests
    others = [test for position, test in enumerate(tests) if position not in known]
    limit_seconds = SUITE_LIMITS * under_test.rules.time_limit_seconds
    report = await under_test.server.run(files, others, limit_seconds)
    return None if report.passed_ids.issuperset(others) else ProofOutcome.BREAKS_OTHERS


def _named(candidate: Candidate, baseline: Baseline) -> tuple[list[int], list[int]]:
    """Positions of the stable tests that a given task names as failing, and as passing."""
    position = {test: number for number, test in enumerate(baseline.tests)}
    failing = [position[test] for test in candidate.named_failing if test in position]
    passing = [position[test] for test in candidate.named_passing if test in position]
    return failing, [number for number in passing if number not in frozenset(failing)]


def choose_covering(
    candidate: Candidate, covering: Sequence[int], under_test: RepositoryUnderTest
) -> list[int]:
    """Covering tests to run, first those named after the symbol, then those with few calls."""
    baseline = under_test.baseline
    word = candidate.symbol.rpartition(".")[2].strip("_").lower().replace("_", "")

    def rank(position: int) -> tuple[bool, int, str]:
        test = baseline.tests[position]
        plain = test.partition("::")[2].lower().replace("_", "")
        return (not word or word not in plain, baseline.call_bits[position], test)

    ordered = sorted(covering, key=rank)
    most = under_test.rules.max_tests_first_run
    if len(ordered) <= most:
        return ordered
    rest = ordered[most // 2 :]
    drawn = random.Random(candidate.candidate_id).sample(rest, most - most // 2)
    return [*ordered[: most // 2], *drawn]


def _guards(candidate: Candidate, covering: Sequence[int], baseline: Baseline) -> list[int]:
    """Cheap tests that do not call the symbol, of the same files if possible."""
    files = {baseline.tests[position].partition("::")[0] for position in covering}
    known = frozenset(covering)
    outside = [position for position in range(len(baseline.tests)) if position not in known]
    near = [p for p in outside if baseline.tests[p].partition("::")[0] in files]
    others = near or outside
    others.sort(key=lambda position: (baseline.call_bits[position], baseline.tests[position]))
    cheap = others[: max(8, len(others) // 2)]
    return sorted(random.Random(candidate.candidate_id).sample(cheap, min(4, len(cheap))))


async def _first_run(
    files: dict[str, bytes], tests: tuple[str, ...], under_test: RepositoryUnderTest
) -> tuple[TestReport, ProofOutcome | None]:
    """Report of the tests on a broken state, and the reason for a refusal, from these tests or from another file's.

    One cheap test of every test file runs after the tests, to detect a broken import. If anything is refused, both
    groups run separately, to find the cause.
    """
    limit_seconds = under_test.rules.time_limit_seconds
    cheap = _cheapest_of_files(under_test.baseline)
    together = tuple(dict.fromkeys((*tests, *cheap)))
    whole = await under_test.server.run(files, together, limit_seconds)
    parts = [_keep(whole, tests), _keep(whole, cheap)]
    if not any(map(_refuse, parts)):
        return parts[0], None
    if TestOutcome.TIMEOUT in parts[0].outcomes.values():  # no test of another file ran before it
        return parts[0], ProofOutcome.TIMEOUT
    report = await under_test.server.run(files, tests, limit_seconds)
    refusal = _refuse(report)
    if refusal is None:
        imports = await under_test.server.run(files, cheap, limit_seconds)
        is_broken = _refuse(imports) is ProofOutcome.BREAKS_IMPORT
        refusal = ProofOutcome.BREAKS_IMPORT if is_broken else None
    return report, refusal


def _keep(report: TestReport, tests: Sequence[str]) -> TestReport:
    """The report, reduced to some of its tests."""
    return report.model_copy(update={"outcomes": {test: report.outcomes[test] for test in tests}})


def _cheapest_of_files(baseline: Baseline) -> tuple[str, ...]:
    """The test with the fewest calls of each file."""
    cheapest: dict[str, int] = {}
    for position, test in enumerate(baseline.tests):
        file = test.partition("::")[0]
        best = cheapest.get(file)
        if best is None or baseline.call_bits[position] < baseline.call_bits[best]:
            cheapest[file] = position
    return tuple(baseline.tests[position] for position in cheapest.values())


async def _second_run(
    candidate: Candidate,
    files: dict[str, bytes],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    under_test: RepositoryUnderTest,
) -> ProofOutcome:
    tests = [*fail_to_pass, *pass_to_pass]
    random.Random(f"second {candidate.candidate_id}").shuffle(tests)
    limit_seconds = under_test.rules.time_limit_seconds
    report = await under_test.second.run_again(files, tests, limit_seconds)
    is_same = report.passed_ids == frozenset(pass_to_pass) and not report.tampering
    return ProofOutcome.PROVEN if is_same and _refuse(report) is None else ProofOutcome.UNSTABLE


async def try_cheats(
    candidate: Candidate,
    files: dict[str, bytes],
    fail_to_pass: Sequence[str],
    under_test: RepositoryUnderTest,
) -> ProofOutcome:
    """CHEATED if deleting the tests changes the judged files, or if skipping every test passes any, else PROVEN."""
    repository = under_test.server.repository
    without_tests: dict[str, bytes | None] = {**files}
    without_tests |= dict.fromkeys(filter(repository.is_test, repository.files))
    if repository.keep_editable(without_tests) != repository.keep_editable(files):
        return ProofOutcome.CHEATED
    drawn = random.Random(f"cheat {candidate.candidate_id}").random()
    if drawn >= under_test.rules.cheater_share:
        return ProofOutcome.PROVEN
    skipping = {path: _SKIP_EVERYTHING + content for path, content in files.items()}
    limit_seconds = under_test.rules.time_limit_seconds
    report = await under_test.server.run_again(skipping, fail_to_pass, limit_seconds)
    return ProofOutcome.CHEATED if report.passed_ids else ProofOutcome.PROVEN


async def refuse_right_fix(problem: Problem, under_test: RepositoryUnderTest) -> str:
    """Reason why the grader refuses the original with a comment. Empty: it is accepted. The grader would refuse every
    fix if no blind trial tells the broken state from the original, or fixes in other words if a test reads the source.
    """
    repository = under_test.server.repository
    fix = {
        path: repository.files[path] + b"\n# repaired\n"
        for path in problem.break_files(repository.files)
        if repository.is_editable(path) and path.endswith(".py")
    }
    # seeded, so that the draws depend on no other problem; drawn calls would compare the original with itself
    trials = BlindTrials(random.Random(f"trial {problem.problem_id}"), draws_calls=False)
    limit_seconds = under_test.rules.time_limit_seconds
    try:
        verdict = await judge(
            problem, fix, under_test.server, time_limit_seconds=limit_seconds, trials=trials
        )
    except SandboxError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault that fails every attempt ends no build
        verdict = fail_for_fault(problem, error)
    return "" if verdict.passed else verdict.detail


def _refuse(report: TestReport) -> ProofOutcome | None:
    outcomes = list(report.outcomes.values())
    if TestOutcome.TIMEOUT in outcomes:
        return ProofOutcome.TIMEOUT
    if TestOutcome.MISSING in outcomes:
        return ProofOutcome.TIMEOUT if report.route == "killed" else ProofOutcome.BREAKS_IMPORT
    is_broken = report.tampering or all(outcome is TestOutcome.ERROR for outcome in outcomes)
    return ProofOutcome.BREAKS_IMPORT if is_broken else None
