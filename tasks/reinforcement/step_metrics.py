"""Metrics of one RL step: its rollouts and the work of the engines."""

from collections.abc import Mapping, Sequence

from ostinato.infra.agent.transcript import MODEL_FAULTS
from ostinato.tasks.records import Group, Trajectory

ENGINE_TOTALS = (
    "steps",
    "busy_seconds",
    "generated_tokens",
    "prefill_tokens",
    "reused_tokens",
    "occupied_slot_steps",
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
        "solve_rate": sum(member.is_solved for member in members) / count,
        "problems_solved_ratio": sum(
            any(member.is_solved for member in group.trajectories) for group in groups
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
        **_reward_terms(members),
    }


def _reward_terms(members: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each reward term. A term that a trajectory lacks, because it was never graded, counts as 0."""
    names = sorted({name for member in members for name in member.reward.terms})
    return {
        f"reward_{name}_mean": sum(member.reward.terms.get(name, 0.0) for member in members)
        / len(members)
        for name in names
    }


class EngineTotals:
    """Work of all replicas in each step, computed as differences of their running totals. These begin at 0 again in
    a replica that was restarted.
    """

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, float]] = {}  # newest totals of each replica
        self._gained = dict.fromkeys(ENGINE_TOTALS, 0.0)

    def update(self, by_replica: Mapping[str, Mapping[str, float]]) -> None:
        """Adds the work of each replica since its totals before."""
        for replica, numbers in by_replica.items():
            before = self._before.get(replica, {})
            if any(numbers.get(name, 0.0) < before.get(name, 0.0) for name in ENGINE_TOTALS):
                before = {}
            for name in ENGINE_TOTALS:
                self._gained[name] += numbers.get(name, 0.0) - before.get(name, 0.0)
            self._before[replica] = numbers

    def since_last_step(self) -> dict[str, float]:
        """Work of the engines since the last call, up to the newest totals."""
        gained, self._gained = self._gained, dict.fromkeys(ENGINE_TOTALS, 0.0)
        busy = max(1e-9, gained["busy_seconds"])
        return {
            "engine_busy_seconds": gained["busy_seconds"],
            "engine_generated_tokens": gained["generated_tokens"],
            "engine_prefill_tokens": gained["prefill_tokens"],
            "engine_reused_tokens": gained["reused_tokens"],
            "engine_tokens_per_busy_second": gained["generated_tokens"] / busy,
            "engine_batch_mean": gained["occupied_slot_steps"] / max(1.0, gained["steps"]),
        }
