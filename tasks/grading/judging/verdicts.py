"""Verdicts on the end state of an attempt.

`judge` lays the changed files, filtered by path, over the pristine repository in the test server's box,
never in the agent's. Every required test must pass by name, exactly once. A pass may also have to hold
under a second runner and on calls that no test makes. A lost machine raises SandboxHostLost, one without
free capacity CapacityExhausted. Neither becomes a verdict.
"""

import time
from collections.abc import Mapping

from ostinato.infra.agent.tools.testing import describe_report
from ostinato.infra.platform.errors import GradingError, boundary
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import CallRequest, format_call, make_calls
from ostinato.infra.sandbox.plain_run import run_plainly
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, TestOutcome, TestReport
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.change import AttemptChange
from ostinato.tasks.grading.cheating.attacks import find_forbidden
from ostinato.tasks.grading.config import Charge, Harm, HarmConfig, Pattern
from ostinato.tasks.grading.environments import ENVIRONMENTS, Environment
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.old_names import find_old_name
from ostinato.tasks.grading.judging.other_code import OtherCode, find_suite_failures, name_some
from ostinato.tasks.records import FunctionOracle, Problem, Verdict

CALL_SECONDS = 0.5

BOX_LIMITS = SandboxLimits(memory_bytes=2 << 30)


async def judge(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    server: TestServer,
    *,
    time_limit_seconds: float,
    second_runner: bool = False,
    asks_oracle: bool = False,
    trials: BlindTrials | None = None,
    charges: Mapping[Harm, Charge] = HarmConfig().charges,
) -> Verdict:
    """The verdict on one end state. Changes of tests and of runner files are ignored."""
    check_repository(problem, server.repository)
    started = time.perf_counter()
    required = required_tests(problem)
    ignored = AttemptChange.of(problem, changed_files, server.repository).ignored_paths
    given = problem.break_files(server.repository.files)
    attacks = find_forbidden(changed_files, server.repository, given)
    if attacks or not required:
        reason = f"the change brings {', '.join(attacks)} into product code"
        detail = f"refused: {reason if attacks else 'no test is required'}"
        return _untested(problem, detail, attacks, started=started, ignored_paths=ignored)
    report = await server.run(changed_files, required, time_limit_seconds)
    if report.passed and second_runner:
        report = _agree(
            report,
            await run_plainly(server.repository, changed_files, required, time_limit_seconds),
        )
    difference = ""
    if report.passed:
        difference = await find_old_name(problem, changed_files, server.repository)
    if report.passed and not difference and asks_oracle:
        difference = await differs_by_oracle(problem, changed_files, server.repository)
    harms: dict[Harm, str] = {}
    if report.passed and not difference and trials is not None:
        found = await trials.judge(problem, changed_files, server.repository)
        harms = found.harms
        difference = found.difference or _refusal(harms, charges)
        if not difference:
            harms |= await find_suite_harm(problem, changed_files, server, time_limit_seconds)
            difference = _refusal(harms, charges)
    return Verdict(
        problem_id=problem.problem_id,
        passed=report.passed and not difference,
        tests_required=len(required),
        tests_passed=len(report.passed_ids),
        outcomes={test: outcome.value for test, outcome in report.outcomes.items()},
        detail=report.tampering or difference or describe_report(report),
        wall_seconds=time.perf_counter() - started,
        tampering=(report.tampering,) if report.tampering else (),
        ignored_paths=ignored,
        harms={harm.value: detail for harm, detail in harms.items() if charges[harm] != 0},
    )


def _refusal(harms: Mapping[Harm, str], charges: Mapping[Harm, Charge]) -> str:
    """Reason why a pass is refused for its harms. Empty: it is not refused."""
    refused = [f"{harm.value}: {it}" for harm, it in harms.items() if charges[harm] == "refuse"]
    return f"harmful: {'; '.join(refused)}" if refused else ""


async def find_suite_harm(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    server: TestServer,
    time_limit_seconds: float,
) -> dict[Harm, str]:
    """The harm of tests that no longer pass. Empty if only the problem's own code changed, unless it is a refactoring,
    whose own code is everything that uses the symbol.
    """
    changed = server.repository.keep_editable(changed_files)
    other = OtherCode.of(problem, server.repository, changed)
    if not changed or (problem.old_place is None and not other.modules):
        return {}
    failing = await find_suite_failures(server, changed, time_limit_seconds)
    return {Harm.SUITE: f"{name_some(failing)} passed before"} if failing else {}


def check_repository(problem: Problem, repository: PreparedRepository) -> None:
    """GradingError if the problem was proven on another repository."""
    if problem.repository_fingerprint != repository.fingerprint:
        raise GradingError(
            f"problem {problem.problem_id}: proven on repository {problem.repository} with "
            f"fingerprint {problem.repository_fingerprint}, the test server holds "
            f"{repository.fingerprint}"
        )


def fail_for_fault(problem: Problem, error: Exception) -> Verdict:
    """The verdict on an attempt that could not be graded: a failure, with a flag."""
    fault = f"fault while grading: {type(error).__name__}"
    return _untested(problem, f"{fault}: {error!s:.200}", (fault,))


def _untested(
    problem: Problem,
    detail: str,
    tampering: tuple[str, ...],
    *,
    started: float | None = None,
    ignored_paths: tuple[str, ...] = (),
) -> Verdict:
    """A failed verdict without a test run. `started`: by the performance counter; None: not timed."""
    required = required_tests(problem)
    return Verdict(
        problem_id=problem.problem_id,
        passed=False,
        tests_required=len(required),
        tests_passed=0,
        outcomes=dict.fromkeys(required, TestOutcome.MISSING.value),
        detail=detail,
        wall_seconds=0.0 if started is None else time.perf_counter() - started,
        tampering=tampering,
        ignored_paths=ignored_paths,
    )


def required_tests(problem: Problem) -> tuple[str, ...]:
    """Tests that have to pass, each once."""
    return tuple(dict.fromkeys((*problem.fail_to_pass, *problem.pass_to_pass)))


async def judge_in_environment(
    problem: Problem, changed_files: Mapping[str, bytes | None], repository: PreparedRepository
) -> Verdict:
    """The verdict of the problem's own environment on one end state."""
    started = time.perf_counter()
    environment: Environment = ENVIRONMENTS.load(problem.environment)
    left = {**repository.files, **changed_files}
    files = {path: content for path, content in left.items() if content is not None}
    with boundary(GradingError, f"environment {problem.environment}"):
        found = await environment.judge(
            problem, files, lambda: open_box(repository, changed_files, BOX_LIMITS)
        )
    outcome = TestOutcome.PASSED if found.passed else TestOutcome.FAILED
    return Verdict(
        problem_id=problem.problem_id,
        passed=found.passed,
        tests_required=1,
        tests_passed=int(found.passed),
        outcomes={problem.environment: outcome.value},
        detail=found.detail,
        wall_seconds=time.perf_counter() - started,
    )


async def differs_by_oracle(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    repository: PreparedRepository,
) -> str:
    """First difference between change and original on held-out calls. Empty: none, or no such calls."""
    if problem.oracle is None:
        return ""
    changed = repository.keep_editable(changed_files)
    async with open_box(repository, changed, BOX_LIMITS) as sandbox:
        return await judge_by_oracle(sandbox, problem.oracle)


def _agree(first: TestReport, second: TestReport) -> TestReport:
    """The first report if the second one passed, else the first with the worse outcome of each test. A timeout
    under the second runner leaves the pass unconfirmed, but it is not reported as a disagreement.
    """
    if second.passed:
        return first
    unpassed = [test for test in first.outcomes if test not in second.passed_ids]
    different = [test for test in unpassed if second.outcomes[test] is not TestOutcome.TIMEOUT]
    found = second.tampering or ", ".join(different[:3])
    tampering = f"{Pattern.RUNNERS_DISAGREE}: {found}" if found else ""
    outcomes = {
        test: outcome if test in second.passed_ids else second.outcomes[test]
        for test, outcome in first.outcomes.items()
    }
    return first.model_copy(update={"outcomes": outcomes, "tampering": tampering})


async def judge_by_oracle(sandbox: Sandbox, oracle: FunctionOracle) -> str:
    """First difference between the code in the sandbox and the original on the held-out calls. Empty: all agree."""
    calls = [CallRequest(oracle.path, oracle.symbol, call.arguments) for call in oracle.held_out]
    results = await make_calls(sandbox, calls, CALL_SECONDS)
    different = [
        f"{format_call(oracle.symbol, call.arguments)} gives {result}, wanted {call.result}"
        for call, result in zip(oracle.held_out, results, strict=True)
        if result != call.result
    ]
    if calls and not different:
        return ""
    agreeing = f"{len(calls) - len(different)} of {len(calls)} held-out calls agree"
    return f"differs from the original: {agreeing}; {''.join(different[:1])}"
