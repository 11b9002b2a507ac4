"""Requests of RL runs over the miniature problems that end within a minute."""

from pathlib import Path
from typing import Literal

from ostinato.infra.agent.config import HarnessConfig
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.records import ReinforcementRequest
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig
from tests.fakes.miniature import make_checkpoint, make_problem_set

GROUPS_PER_STEP = 2
HARNESS = HarnessConfig(max_turns=2, max_generated_tokens=48, context_tokens=128)


def miniature_request(
    directory: Path,
    run_id: str,
    max_steps: int,
    *,
    world_size: int = 1,
    boxes: Literal["worker", "fleet"] = "worker",
    harness: HarnessConfig = HARNESS,
) -> ReinforcementRequest:
    """A run from a random checkpoint; every group is trained, also one whose attempts end alike."""
    return ReinforcementRequest(
        run_id=run_id,
        checkpoint_directory=str(make_checkpoint(directory / "start")),
        problems_directory=str(make_problem_set(directory / "problems")),
        rollout=RolloutConfig(
            group_size=2,
            groups_per_step=GROUPS_PER_STEP,
            concurrent_trajectories=4,
            least_spread=0.0,
            curriculum=CurriculumConfig(revisit_groups=1),
            boxes=boxes,
        ),
        learning=LearningConfig(world_size=world_size, keep_for_replay=True),
        harness=harness,
        max_steps=max_steps,
        engine_slots=4,
    )
