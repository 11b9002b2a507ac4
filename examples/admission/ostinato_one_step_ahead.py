"""Admission of rollouts: the groups of the current step and of the next one."""

from ostinato.tasks.rollout.staleness import ConsumptionEstimate


def one_step_ahead(estimate: ConsumptionEstimate, groups_per_step: int) -> int:
    """The groups of two steps, whatever durations are measured."""
    return 2 * groups_per_step
