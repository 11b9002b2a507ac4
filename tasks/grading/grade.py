"""One attempt's verdict and reward. Infrastructure failures raise; they are never graded."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.grading.change import AttemptChange, JudgedAttempt
from ostinato.tasks.grading.config import GradingConfig, Pattern
from ostinato.tasks.grading.monitors import scan_attempt
from ostinato.tasks.grading.rewards import compute_reward
from ostinato.tasks.grading.style import count_new_lints
from ostinato.tasks.grading.verdicts import judge, judge_in_environment
from ostinato.tasks.records import Problem, RewardReport, Verdict

# a pass with one of these is none; attacks on the run always void
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
) -> tuple[Verdict, RewardReport]:
    """Judge the changed files (against the pristine repository) and reward the attempt."""
    if problem.environment:
        verdict = await judge_in_environment(problem, changed_files, test_server.repository)
    else:
        verdict = await judge(
            problem,
            changed_files,
            test_server,
            time_limit_seconds=config.time_limit_seconds,
            second_runner=config.second_runner,
            asks_oracle=config.asks_oracle,
        )
    change = AttemptChange.of(problem, changed_files, test_server.repository)
    attempt = JudgedAttempt(change, verdict, transcript)
    flags = scan_attempt(attempt)
    verdict = void(verdict, [name for name in VOID_PATTERNS if name in flags])
    lints = await count_new_lints(change) if config.style else 0
    found = {name.value: evidence for name, evidence in flags.items()}
    attempt = replace(attempt, verdict=verdict)
    return verdict, compute_reward(attempt, config, new_lints=lints, flags=found)


def void(verdict: Verdict, patterns: list[str]) -> Verdict:
    """A pass that was got by one of these patterns is none."""
    if not verdict.passed or not patterns:
        return verdict
    return verdict.model_copy(
        update={
            "passed": False,
            "tampering": (*verdict.tampering, *map(str, patterns)),
            "detail": f"void: {', '.join(map(str, patterns))}",
        }
    )


def make_grader(config: GradingConfig) -> Grader:
    """`grade` with its settings bound, as rollout workers call it."""
    return partial(grade, config=config)
