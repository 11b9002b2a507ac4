"""Blind trials as tests ask them."""

from collections.abc import Mapping

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.judging.blind_trial import BlindTrials
from ostinato.tasks.records import Problem


async def find_difference(
    trials: BlindTrials,
    problem: Problem,
    changed: Mapping[str, bytes | None],
    repository: PreparedRepository,
) -> str:
    """First difference of values between a change and the original. Empty: they agree everywhere."""
    return (await trials.judge(problem, changed, repository)).difference
