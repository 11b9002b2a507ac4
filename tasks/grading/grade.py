"""Verdict and reward of one attempt. A lost machine raises, but a fault that the attempt causes is its failure."""

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from ostinato.infra.agent.tools.lints import LINTED_SUFFIXES, new_lints
from ostinato.infra.agent.transcript import DialogueScore, EndReason, Transcript
from ostinato.infra.platform.errors import (
    AgentError,
    CapacityExhausted,
    SandboxHostLost,
    SandboxLost,
)
from ostinato.infra.sandbox.test_server import TestServer, as_text
from ostinato.tasks.grading.change import AttemptChange, JudgedAttempt
from ostinato.tasks.grading.cheating.monitors import scan_attempt
from ostinato.tasks.grading.config import GradingConfig, Pattern
from ostinato.tasks.grading.judging.answers import judge_reply
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.grading.judging.verdicts import (
    check_repository,
    fail_for_fault,
    judge,
    judge_in_environment,
)
from ostinato.tasks.grading.rewards import compute_reward
from ostinato.tasks.records import Problem, RewardReport, Verdict

logger = logging.getLogger(__name__)
# patterns that make a pass void; attacks on the run always do
VOID_PATTERNS = (Pattern.HARD_CODED_TESTS,)
Grader = Callable[
    [Problem, Mapping[str, bytes | None], Transcript, TestServer],
    Awaitable[tuple[Verdict, RewardReport]],
]


async def grade(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    transcript: Transcript,
    test_server: TestServer,
    config: GradingConfig,
    trials: BlindTrials | None = None,
) -> tuple[Verdict, RewardReport]:
    """Judges the changed files (against the pristine repository), or the final message where the problem wants
    one, and rewards the attempt.

    A fault that the attempt can cause gives a failed verdict with a flag. Raises if the machine or the
    problem is at fault.
    """
    if transcript.score is not None:
        return score_of(problem, transcript.score)
    trials = trials or (BlindTrials() if config.blind_trial else None)
    if not problem.environment:
        check_repository(problem, test_server.repository)
    change = AttemptChange.of(problem, changed_files, test_server.repository)
    try:
        if transcript.end_reason is EndReason.FAULT:
            raise AgentError(transcript.detail)
        asked = (problem, changed_files, test_server, config, trials)
        try:
            second_runner = random.SystemRandom().random() < config.second_runner_share
            verdict = (
                await _judge(*asked, second_runner=second_runner)
                if problem.reply is None
                else judge_reply(problem, change, transcript)
            )
        except SandboxHostLost:
            raise
        except SandboxLost as error:  # an attempt that ends its box ends the next one too
            logger.warning("problem=%s judged again: %s", problem.problem_id, error)
            # a change must not escape the second runner by ending its box
            verdict = await _judge(*asked, second_runner=True)
        attempt = JudgedAttempt(change, verdict, transcript)
        flags = scan_attempt(attempt)
        lints = await _count_new_lints(change) if config.style else 0
    except (CapacityExhausted, SandboxHostLost):
        raise
    except Exception as error:  # noqa: BLE001 - nothing an attempt does ends a run
        logger.warning("problem=%s fault while grading: %r", problem.problem_id, error)
        verdict = fail_for_fault(problem, error)
        attempt = JudgedAttempt(change, verdict, transcript)
        flags, lints = {Pattern.RUN_TAMPERING: verdict.detail}, 0
    verdict = void(_in_text(verdict), [name for name in VOID_PATTERNS if name in flags])
    found = {name.value: as_text(evidence) for name, evidence in flags.items()}
    attempt = replace(attempt, verdict=verdict)
    return verdict, compute_reward(attempt, config, new_lints=lints, flags=found)


def score_of(problem: Problem, score: DialogueScore) -> tuple[Verdict, RewardReport]:
    """Verdict and reward from an environment that held the dialogue. Its score is the only reward term."""
    verdict = Verdict(
        problem_id=problem.problem_id,
        passed=score.passed,
        tests_required=1,
        tests_passed=int(score.passed),
        outcomes={problem.environment: "passed" if score.passed else "failed"},
        detail=", ".join(f"{name} {value:g}" for name, value in score.metrics.items()),
    )
    return verdict, RewardReport(total=score.reward, terms={"environment": score.reward})


def _in_text(verdict: Verdict) -> Verdict:
    """The verdict as text that every file and terminal accepts. Names of files may contain other bytes."""
    return verdict.model_copy(
        update={
            "detail": as_text(verdict.detail),
            "tampering": tuple(map(as_text, verdict.tampering)),
            "ignored_paths": tuple(map(as_text, verdict.ignored_paths)),
        }
    )


async def _judge(
    problem: Problem,
    changed_files: Mapping[str, bytes | None],
    test_server: TestServer,
    config: GradingConfig,
    trials: BlindTrials | None,
    *,
    second_runner: bool,
) -> Verdict:
    if problem.environment:
        return await judge_in_environment(problem, changed_files, test_server.repository)
    return await judge(
        problem,
        changed_files,
        test_server,
        time_limit_seconds=config.time_limit_seconds,
        second_runner=second_runner,
        asks_oracle=config.asks_oracle,
        trials=trials,
        charges=config.harms.charges,
    )


def void(verdict: Verdict, patterns: list[str]) -> Verdict:
    """The verdict, as a failure if all tests passed and the attempt shows one of these patterns."""
    if not patterns or verdict.tests_passed < verdict.tests_required:
        return verdict
    found = f"; {verdict.detail}" if not verdict.passed else ""
    return verdict.model_copy(
        update={
            "passed": False,
            "tampering": (*verdict.tampering, *map(str, patterns)),
            "detail": f"void: {', '.join(map(str, patterns))}{found}",
        }
    )


def make_grader(config: GradingConfig) -> Grader:
    """`grade` with its settings bound, as rollout workers call it. The grader keeps its blind trials."""
    trials = BlindTrials() if config.blind_trial else None
    return partial(grade, config=config, trials=trials)


async def _count_new_lints(change: AttemptChange) -> int:
    """Lint findings that the attempt added, over all counted files. Removed files have none. Starts one
    linter process per file, as the agent's read_lints tool does.
    """
    total = 0
    for file in change.counted:
        if file.after is None or not file.path.endswith(LINTED_SUFFIXES):
            continue
        before = None if file.before is None else file.before.decode(errors="replace")
        total += len(await new_lints(before, file.after.decode(errors="replace"), file.path))
    return total
