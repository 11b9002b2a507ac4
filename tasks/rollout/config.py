"""Settings of rollouts: slots, staleness, retries."""

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.record import Record, Share
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxLimits
from ostinato.tasks.grading.config import GradingConfig

# many boxes that start at once wait for one another's processor time
BOX_LIMITS = SandboxLimits(start_seconds=180.0)
# Each an Admission of staleness.py.
ADMISSIONS = PluginGroup(
    "ostinato.admissions",
    "admission",
    {
        "expected": "ostinato.tasks.rollout.staleness:start_when_expected",
        "cap": "ostinato.tasks.rollout.staleness:start_at_once",
    },
)


class StalenessConfig(Record):
    """Bound on staleness, and patience with late groups."""

    max_staleness_versions: NonNegativeInt = 2
    """a sample is trained only when trainer version minus its oldest weight version is at most
    this; 0: synchronous"""
    admission: str = "expected"
    """rule of when a group starts, never beyond the bound. expected: when the trainer will have used up
    those before it about when it is ready; cap: as early as the bound allows, so that finished
    groups wait; others by the entry point group ostinato.admissions"""
    pace_limit_seconds: NonNegativeFloat = 60.0
    """longest a step is held for groups that would become stale without it; after that they end as
    stale"""
    update_interval_steps: PositiveInt = 1
    """steps from one weight update of the engines to the next; more saves transfers and makes rollouts
    older. At most max_staleness_versions + 1; at that value rollouts wait for each update"""

    @field_validator("admission")
    @classmethod
    def _known_admission(cls, admission: str) -> str:
        ADMISSIONS.refuse_unknown([admission])
        return admission

    @model_validator(mode="after")
    def _interval_within_bound(self) -> Self:
        if self.update_interval_steps > self.max_staleness_versions + 1:
            raise ValueError(
                f"update_interval_steps is {self.update_interval_steps}, wanted at most "
                f"{self.max_staleness_versions + 1}, one more than max_staleness_versions: rollouts of the engines' "
                "version would be too old before the next update"
            )
        return self

    def updates_engines(self, step: int) -> bool:
        """Whether the engines follow to the weights of this step."""
        return step % self.update_interval_steps == 0


class CurriculumConfig(Record):
    """Choice of problems."""

    revisit_groups: NonNegativeInt = 0
    """groups of other problems before a problem may come again; 0: never, a single epoch, and the
    run ends with its problems"""


class RolloutConfig(Record):
    """The rollout stage."""

    group_size: int = Field(default=8, ge=2)
    """attempts at one problem whose rewards are centred together"""
    groups_per_step: PositiveInt = 16
    """groups that one optimiser step trains on"""
    least_spread: NonNegativeFloat = 0.1
    """largest minus smallest reward from which a group counts towards groups_per_step; others are
    trained along with them; 0: every group counts"""
    concurrent_trajectories: PositiveInt = 64
    """attempts in flight, over all rollout workers"""
    boxes: Literal["worker", "fleet"] = "worker"
    """place where attempts run: worker: in boxes of the rollout worker's own machine; fleet: in boxes of
    the sandbox fleet, on whichever machine of the cluster has room"""
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """kind of box for an agent's commands, in rollouts, evaluation and the gateway: namespace: a
    bubblewrap box; microvm: a virtual machine, which needs QEMU"""
    forked_share: Share = 0.0
    """share of groups whose other attempts branch off the first, box and context, after its first
    failing test run, and are compared from there on (tasks/rollout/forks.py); 0: none"""
    infrastructure_retries: NonNegativeInt = 3
    """new attempts after a sandbox or engine failure of a member"""
    max_turns: PositiveInt | None = None
    """answers of the model in one attempt of a rollout; fewer than the harness allows put the
    reward on the first edits; None: the harness's"""
    temperature: PositiveFloat = Field(default=1.0, description="sampling temperature of rollouts")
    seed: NonNegativeInt = Field(default=0, description="seed of problem choice and of sampling")
    staleness: StalenessConfig = StalenessConfig()
    curriculum: CurriculumConfig = CurriculumConfig()


class WorkerSetup(Record):
    """Everything a worker process needs beside a model."""

    tokenizer_directory: str
    problems_directory: str
    harness: HarnessConfig
    grading: GradingConfig
    concurrent_trajectories: int
    search_directory: str | None = None
    """A trained encoder's files; None: codebase_search ranks by words alone."""
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """Kind of box for agents' commands, in boxes of this process."""
