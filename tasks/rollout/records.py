"""Records of the rollout stage that other stages use."""

from dataclasses import dataclass

from ostinato.infra.agent.transcript import Transcript
from ostinato.models.decode.protocol import Priority
from ostinato.tasks.records import Outcome, Problem, RewardReport, Trajectory, Verdict

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
    ) -> Trajectory:
        """The record of the attempt. `times`: when it began and ended."""
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
            started_at=times[0],
            finished_at=times[1],
        )
