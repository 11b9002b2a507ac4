"""Admission of rollouts: the groups of the next step beside those of the one under way."""

from ostinato.tasks.rollout.staleness import ConsumptionEstimate


def one_step_ahead(estimate: ConsumptionEstimate, groups_per_step: int) -> int:
    """Two steps' groups, whatever groups and steps take."""
    return 2 * groups_per_step
