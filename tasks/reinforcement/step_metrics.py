"""Metrics of one RL step: its rollouts and the work of the engines."""

from collections.abc import Mapping, Sequence

from ostinato.infra.agent.tools import names
from ostinato.infra.agent.tools.testing import is_pytest
from ostinato.infra.agent.transcript import MODEL_FAULTS, CallStatus, ToolCallRecord
from ostinato.tasks.records import Group, Trajectory

_EDIT, _LOOK, _TEST = "edit", "look", "test"  # purposes of calls
_LOOKS = names.SEARCH_TOOLS | {names.READ_FILE, names.GLOB}
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
        **_habits(members),
        "broken_call_ratio": broken / max(1, len(calls)),
        "trajectory_seconds_mean": sum(member.finished_at - member.started_at for member in members)
        / count,
        **_reward_terms(members),
    }


def _habits(members: Sequence[Trajectory]) -> dict[str, float]:
    """Calls per turn, edits per attempt, and of the attempts that edit, the share that looked before its first edit
    and the share that ran tests after its last one. The shares are left out when no attempt edits.
    Only calls of the built-in tools count, so not what an agent of others does in its shell.
    """
    turns = sum(len(member.transcript.turns) for member in members)
    called = [
        [_purpose(call) for turn in member.transcript.turns for call in turn.calls]
        for member in members
    ]
    editing = [purposes for purposes in called if _EDIT in purposes]
    habits = {
        "calls_per_turn_mean": sum(map(len, called)) / max(1, turns),
        "edits_mean": sum(purposes.count(_EDIT) for purposes in called) / len(members),
    }
    if editing:
        looked = sum(_LOOK in purposes[: purposes.index(_EDIT)] for purposes in editing)
        tested = sum(_TEST in purposes[::-1][: purposes[::-1].index(_EDIT)] for purposes in editing)
        habits["looks_before_edits_ratio"] = looked / len(editing)
        habits["tests_after_edits_ratio"] = tested / len(editing)
    return habits


def _purpose(call: ToolCallRecord) -> str:
    """What a call is for. Empty: none of the three purposes, or the call was not run."""
    if call.status is not CallStatus.OK:
        return ""
    if call.tool == names.RUN_TERMINAL:
        return _TEST if is_pytest(call.arguments.get("command", "")) else ""
    return _EDIT if call.tool in names.EDIT_TOOLS else _LOOK if call.tool in _LOOKS else ""


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
