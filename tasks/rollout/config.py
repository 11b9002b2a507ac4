"""Settings of rollouts: slots, staleness, retries."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.plugins import PluginGroup
from ostinato.infra.platform.record import Record, Share
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.infra.sandbox.protocol import SandboxKind, SandboxLimits
from ostinato.tasks.grading.config import GradingConfig

# Many boxes that start at once compete for processor time, so the start limit is generous.
BOX_LIMITS = SandboxLimits(start_seconds=180.0)
# Functions of type Admission (staleness.py) by name.
ADMISSIONS = PluginGroup(
    "ostinato.admissions",
    "admission",
    {
        "expected": "ostinato.tasks.rollout.staleness:start_when_expected",
        "cap": "ostinato.tasks.rollout.staleness:start_at_once",
    },
)
# Functions of type ProblemWeight (curriculum.py) by name.
CURRICULA = PluginGroup(
    "ostinato.curricula",
    "curriculum",
    {
        "spread": "ostinato.tasks.rollout.curriculum:spread_weight",
        "uniform": "ostinato.tasks.rollout.curriculum:uniform_weight",
    },
)
# Functions of type AttemptTemperature (attempts.py) by name.
SAMPLERS = PluginGroup(
    "ostinato.samplers",
    "sampler",
    {"constant": "ostinato.tasks.rollout.attempts:constant_temperature"},
)
PROBE_ATTEMPTS = 4  # at each problem
START_PROBES = "start"
PROBES_FILE = "probes.json"  # of an artifact: a scorecard


class StalenessConfig(Record):
    """Bound on staleness, and how long steps wait for late groups."""

    max_staleness_versions: NonNegativeInt = 2
    """largest trainer version minus oldest weight version with which a sample is trained; 0:
    synchronous"""
    admission: Annotated[str, AfterValidator(ADMISSIONS.known)] = "expected"
    """rule for when a group starts, always within the bound. expected: so late that the trainer has used
    up the earlier groups at about the time when it is ready; cap: as early as the bound allows, so that
    finished groups wait; the entry point group ostinato.admissions adds others"""
    pace_limit_seconds: NonNegativeFloat = 60.0
    """longest time that a step is held for groups that would become stale without it; later they end as
    stale"""
    update_interval_steps: PositiveInt = 1
    """steps between weight updates of the engines; larger values save transfers and make rollouts
    older. At most max_staleness_versions + 1; at that value rollouts wait for each update"""

    @model_validator(mode="after")
    def _interval_within_bound(self) -> Self:
        if self.update_interval_steps > self.max_staleness_versions + 1:
            raise ValueError(
                f"update_interval_steps is {self.update_interval_steps}, wanted at most "
                f"{self.max_staleness_versions + 1}, one more than max_staleness_versions: rollouts would be too old "
                "before the engines' next update"
            )
        return self

    def updates_engines(self, step: int) -> bool:
        """Whether the engines apply the weights of this step."""
        return step % self.update_interval_steps == 0


def _known_probes(name: str) -> str:
    if name != START_PROBES and not re.fullmatch(r"probes/[\w.-]+@\d+", name):
        raise ValueError(
            f"wanted probes/NAME@VERSION, as `ostinato problems probe` prints it, or {START_PROBES!r}"
        )
    return name


class CurriculumConfig(Record):
    """Choice of problems."""

    weight: Annotated[str, AfterValidator(CURRICULA.known)] = "spread"
    """rule for the weight of a problem in the next draw. spread: the probability that its group has mixed
    results; uniform: the same weight for all; the entry point group ostinato.curricula adds others"""
    revisit_groups: NonNegativeInt = 0
    """groups of other problems before a problem may be drawn again; 0: each problem is drawn once, and
    the run ends when all have been"""
    probes: Annotated[str, AfterValidator(_known_probes)] | None = None
    """attempts of a checkpoint at the training problems, made before RL. Problems that every attempt solved
    are left out, and the weights of the others begin with the counts of these attempts.
    probes/NAME@VERSION: probes that `ostinato problems probe` made; start: 4 attempts at each problem by the
    checkpoint that RL starts from; None: RL begins with all problems"""
    unsolved_share: Share = 0.25
    """share of the problems without a solved attempt of the probes that RL keeps, drawn by rollout.seed; read
    only with `probes`"""


class RolloutConfig(Record):
    """The rollout stage."""

    group_size: int = Field(default=8, ge=2)
    """attempts at one problem; their rewards are centred together"""
    groups_per_step: PositiveInt = 16
    """groups that one optimiser step trains on"""
    least_spread: NonNegativeFloat = 0.1
    """least difference between largest and smallest reward for a group to count towards groups_per_step;
    other groups are trained too but do not count; 0: every group counts"""
    concurrent_trajectories: PositiveInt = 64
    """attempts in flight, summed over all rollout workers"""
    boxes: Literal["worker", "fleet"] = "worker"
    """place where attempts run. worker: in boxes on the rollout worker's machine; fleet: in boxes of the
    sandbox fleet, on any machine of the cluster with free capacity"""
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """kind of box for an agent's commands, in rollouts, evaluation and the gateway. namespace: a
    bubblewrap box; microvm: a virtual machine, which needs QEMU"""
    forked_share: Share = 0.0
    """share of groups in which the other attempts continue from the first one's box and context after its first
    failing test run, and are compared from there on (tasks/rollout/forks.py); 0: none"""
    infrastructure_retries: NonNegativeInt = 3
    """retries of an attempt after a sandbox or engine failure"""
    max_turns: PositiveInt | None = None
    """most turns in one attempt of a rollout; fewer than the harness allows concentrate the reward on
    the first edits; None: the limit of the harness"""
    temperature: PositiveFloat = Field(default=1.0, description="sampling temperature of rollouts")
    sampler: str = "constant"
    """rule for the temperature of each attempt. constant: `temperature`; the entry point group
    ostinato.samplers adds others"""
    seed: NonNegativeInt = Field(default=0, description="seed of problem choice and of sampling")
    staleness: StalenessConfig = StalenessConfig()
    curriculum: CurriculumConfig = CurriculumConfig()

    @model_validator(mode="after")
    def _known_sampler(self) -> Self:
        SAMPLERS.refuse_unknown([self.sampler])
        if self.forked_share and self.sampler != "constant":
            raise ValueError(
                f"sampler is {self.sampler!r} with forked_share={self.forked_share:g}, wanted 'constant' or "
                "forked_share=0: an attempt that continues another one samples at its temperature"
            )
        return self


class WorkerSetup(Record):
    """Everything that a worker process needs apart from a model."""

    tokenizer_directory: str
    problems_directory: str
    harness: HarnessConfig
    grading: GradingConfig
    concurrent_trajectories: int
    search_directory: str | None = None
    """Files of a trained encoder; None: codebase_search ranks by words only."""
    sandbox: SandboxKind = SandboxKind.NAMESPACE
    """Kind of this process's boxes for agents' commands."""
    sandboxes: SandboxConfig = SandboxConfig()
