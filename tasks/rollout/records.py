"""Records of the rollout stage that other stages use."""

from dataclasses import dataclass

from ostinato.models.decode.protocol import Priority
from ostinato.tasks.records import Problem


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
