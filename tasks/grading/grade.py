"""One attempt's verdict and reward: the interface of grading.

Owns `grade` and `make_grader`. Enters: problem, transcript, changed files and the repository's test
server. Leaves: a Verdict and a RewardReport. Infrastructure failures raise; they are never graded.
"""

from collections.abc import Awaitable, Callable, Mapping

from infra.harness.transcript import Transcript
from infra.sandbox.test_server import TestServer
from tasks.grading.config import GradingConfig
from tasks.grading.rewards import compute_reward
from tasks.grading.verdicts import judge
from tasks.records import Problem, RewardReport, Verdict

Grader = Callable[
    [Problem, Mapping[str, bytes | None], Transcript, TestServer],
    Awaitable[tuple[Verdict, RewardReport]],
]


async def grade(
    problem: Problem,
    transcript: Transcript,
    changed_files: Mapping[str, bytes | None],
    test_server: TestServer,
    config: GradingConfig,
) -> tuple[Verdict, RewardReport]:
    """Judge the changed files (against the pristine repository) and reward the attempt."""
    verdict = await judge(
        problem, changed_files, test_server, time_limit_seconds=config.time_limit_seconds
    )
    reward = compute_reward(
        problem, verdict, transcript, changed_files, test_server.repository, config
    )
    return verdict, reward


def make_grader(config: GradingConfig) -> Grader:
    """`grade` with its settings bound, in the argument order of rollout workers."""

    async def run_grade(
        problem: Problem,
        changed_files: Mapping[str, bytes | None],
        transcript: Transcript,
        test_server: TestServer,
    ) -> tuple[Verdict, RewardReport]:
        return await grade(problem, transcript, changed_files, test_server, config)

    return run_grade
