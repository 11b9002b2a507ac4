"""Rollouts without models: problems, graded trajectories and a journal in memory."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ostinato.infra.agent.transcript import EndReason, Segment, Transcript, TurnRecord
from ostinato.tasks.records import (
    Group,
    LineEdit,
    Outcome,
    Problem,
    RewardReport,
    Split,
    Trajectory,
    Verdict,
)
from ostinato.tasks.rollout.records import AttemptRequest

End = Literal["committed", "stale", "failed", "trained"]


def make_problem(name: str, solve_rate: float | None = None) -> Problem:
    """A problem with one broken line."""
    edit = LineEdit(
        path="pkg/code.py",
        line_number=2,
        gold_text="    return 1",
        broken_text="    return 2",
    )
    return Problem(
        problem_id=name,
        repository="pkg",
        repository_fingerprint="f0",
        kind="mutation",
        operator="constant",
        path="pkg/code.py",
        symbol="one",
        first_line=1,
        last_line=2,
        prompt="Fix one in pkg/code.py",
        edits=(edit,),
        fail_to_pass=("tests/test_code.py::test_one",),
        pass_to_pass=(),
        split=Split.TRAIN,
        solve_rate=solve_rate,
    )


def make_segment(
    versions: Sequence[int], prompt_tokens: int = 3, layers: int = 2, experts: int = 2
) -> Segment:
    """A prompt and one sampled token per entry of versions."""
    total = prompt_tokens + len(versions)
    sampled = np.arange(total) >= prompt_tokens
    weight_versions = np.full(total, -1, dtype=np.int64)
    weight_versions[sampled] = versions
    return Segment(
        token_ids_T=np.arange(total, dtype=np.int32) + 7,
        loss_mask_T=sampled,
        logprobs_T=np.where(sampled, -0.25, 0.0).astype(np.float32),
        weight_versions_T=weight_versions,
        cache_versions_T=weight_versions,
        routed_experts_TLK=np.zeros((total, layers, experts), dtype=np.int16),
    )


def make_trajectory(
    request: AttemptRequest,
    *,
    versions: Sequence[int] = (0, 0),
    solved: bool = True,
    outcome: Outcome = Outcome.FINISHED,
    started_at: float = 0.0,
    finished_at: float = 1.0,
) -> Trajectory:
    """A graded attempt whose tokens were made by the given weight versions."""
    failed = outcome in (Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED)
    turn = TurnRecord(generated_tokens=len(versions), text="Fixed.", calls=())
    transcript = Transcript(
        segments=(make_segment(versions),) if versions else (),
        turns=(turn,),
        end_reason=EndReason.FINISHED,
        final_message="Fixed.",
        wall_seconds=finished_at - started_at,
    )
    verdict = Verdict(
        problem_id=request.problem.problem_id,
        passed=solved,
        tests_required=1,
        tests_passed=int(solved),
        outcomes={},
    )
    return request.ended(
        outcome,
        "scripted",
        transcript,
        (started_at, finished_at),
        verdict=None if failed else verdict,
        reward=RewardReport(total=float(solved), terms={"solved": float(solved)}),
    )


class MemoryJournal:
    """Remembers what the orchestrator made durable."""

    def __init__(self) -> None:
        self.reserved: list[str] = []
        self.failed: list[str] = []
        self.ends: dict[str, End] = {}

    def reserve(self, requests: list[AttemptRequest], weight_version: int) -> None:
        self.reserved.extend(request.trajectory_id for request in requests)

    def fail(self, trajectory: Trajectory) -> None:
        self.failed.append(trajectory.trajectory_id)

    def commit(self, group: Group) -> None:
        self.ends[group.group_id] = "committed"

    def retire(self, group: Group, reason: str) -> None:
        self.ends[group.group_id] = "stale"
