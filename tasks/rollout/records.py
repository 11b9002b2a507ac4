"""Records of the rollout stage that other stages use."""

from dataclasses import dataclass, replace

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.models.decode.protocol import Priority
from ostinato.tasks.records import Branch, Outcome, Problem, RewardReport, Trajectory, Verdict

UNGRADED = RewardReport(total=0.0, terms={})


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """One attempt at a problem."""

    trajectory_id: str
    group_id: str
    problem: Problem
    attempt: int
    retry: int
    seed: int
    temperature: float = 1.0
    priority: Priority = Priority.TRAINING
    is_trunk: bool = False  # other attempts of its group wait to continue from it (forks.py)
    trunk: Trajectory | None = None  # the attempt from which this one continues

    def again(self, other: "AttemptRequest") -> "AttemptRequest":
        """`other`, a retry with its own id, with this attempt's role in a forked group."""
        return replace(other, is_trunk=self.is_trunk, trunk=self.trunk)

    def lost(self, reason: str, at: float) -> Trajectory:
        """The record of an attempt whose result was lost."""
        transcript = Transcript.of_failure(EndReason.SANDBOX_FAILED, reason)
        return self.ended(Outcome.SANDBOX_FAILED, reason, transcript, (at, at))

    def ended(
        self,
        outcome: Outcome,
        reason: str,
        transcript: Transcript,
        times: tuple[float, float],
        *,
        verdict: Verdict | None = None,
        reward: RewardReport = UNGRADED,
        changed_files: dict[str, str] | None = None,
        branch: Branch | None = None,
    ) -> Trajectory:
        """The record of the ended attempt. `times`: start and end."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            problem_id=self.problem.problem_id,
            attempt=self.attempt,
            seed=self.seed,
            outcome=outcome,
            reason=reason,
            verdict=verdict,
            reward=reward,
            transcript=transcript,
            changed_files=changed_files or {},
            branch=branch,
            started_at=times[0],
            finished_at=times[1],
        )
