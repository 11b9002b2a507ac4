"""The numbers of one RL step: what was rolled out, what was trained, how long it took.

Owns the metric names that reports and plots read. Enters: groups and reports. Leaves: flat
dictionaries.
"""

from collections.abc import Sequence

from infra.harness.transcript import CallStatus
from tasks.records import Group, Trajectory

MODEL_FAULTS = frozenset(
    {CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS}
)


def describe_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the trajectories of a step."""
    members = [member for group in groups for member in group.trajectories]
    count = len(members)
    calls = [call for member in members for turn in member.transcript.turns for call in turn.calls]
    broken = sum(call.status in MODEL_FAULTS for call in calls)
    return {
        "trajectories": count,
        "reward_mean": sum(member.reward.total for member in members) / count,
        "solve_rate": sum(is_solved(member) for member in members) / count,
        "problems_solved_ratio": sum(
            any(is_solved(member) for member in group.trajectories) for group in groups
        )
        / len(groups),
        "generated_tokens_mean": sum(
            turn.generated_tokens for member in members for turn in member.transcript.turns
        )
        / count,
        "turns_mean": sum(len(member.transcript.turns) for member in members) / count,
        "tool_calls_mean": len(calls) / count,
        "broken_call_ratio": broken / max(1, len(calls)),
        "trajectory_seconds_mean": sum(member.finished_at - member.started_at for member in members)
        / count,
    }


def is_solved(trajectory: Trajectory) -> bool:
    """Whether the hidden tests passed."""
    return trajectory.verdict is not None and trajectory.verdict.passed
