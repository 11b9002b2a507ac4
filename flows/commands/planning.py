"""`ostinato plan`: layouts, placements, memory and time of a recipe on a number of GPUs."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.dry_run_records import (
    LARGEST_DIFFERENCE_RATIO,
    DryRunRequest,
    DryRunResult,
    DryRunStage,
)
from ostinato.tasks.planning.inputs import Inputs, RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.placements import (
    ReinforcementWork,
    RlPlacement,
    place_colocated,
    place_separately,
    plan_trainers,
)
from ostinato.tasks.planning.plan import (
    TrainingPlan,
    estimate_layouts,
    estimate_training,
    plan_training,
    search_layout,
)
from ostinato.tasks.planning.publishing import (
    PublishBytes,
    PublishNeeds,
    publish_bytes,
    publish_needs,
)
from ostinato.tasks.planning.simulation import SimulatedLoad, SimulatedRun, Simulation
from ostinato.tasks.pretraining.config import PretrainingLayout
from ostinato.tasks.reinforcement.learning.config import LearningLayout

# recipe section of each training stage, and the axes of its layout
SECTIONS = {
    "pretraining": ("pretraining", PretrainingLayout.model_fields.keys()),
    "reinforcement": ("learning", LearningLayout.model_fields.keys()),
}
AXES = ("tensor", "pipeline", "interleave", "context", "expert", "expert_tensor")
SEPARATE, COLOCATED = "separate", "colocated"
PLACEMENTS = {SEPARATE: place_separately, COLOCATED: place_colocated}
SECONDS_PER_HOUR = 3600
WIDER = 16  # staleness bound of the second simulated row, times the recipe's
MAX_BOUND = 256  # on staleness; a simulation takes steps in proportion to it
DRY_RUN = "ostinato.tasks.planning.dry_run:main"


def pretraining_work(recipe: Recipe) -> TrainingWork:
    """The step of the phase with the longest rows; without phases that of RL."""
    if not recipe.pretraining.phases:
        return learning_work(recipe)
    phase = max(recipe.pretraining.phases, key=lambda phase: phase.sequence_tokens)
    return TrainingWork(
        row_tokens=phase.sequence_tokens,
        attended_tokens=phase.sequence_tokens,
        microbatch_tokens=phase.microbatch_tokens,
        step_tokens=phase.global_batch_tokens,
        fp8=recipe.pretraining.precision == "mx128",
    )


def learning_work(recipe: Recipe) -> TrainingWork:
    """An RL step in which all attempts are as long as the harness allows."""
    longest = recipe.harness.context_tokens
    has_reference = recipe.learning.objective.kl_coefficient > 0
    return TrainingWork(
        row_tokens=longest,
        attended_tokens=longest,
        microbatch_tokens=max(longest, recipe.learning.packing.microbatch_tokens),
        step_tokens=_attempts(recipe) * longest,
        forward_passes=1 if has_reference else 0,
        weight_copies=2 if has_reference else 1,
        is_reinforcement=True,
    )


def _planned_tokens(recipe: Recipe) -> int:
    """Tokens, padding included, that the steps of all pretraining phases compute."""
    phases = recipe.pretraining.phases
    return sum(phase.num_steps * phase.global_batch_tokens for phase in phases)


def rollout_work(recipe: Recipe, inputs: Inputs) -> RolloutWork:
    """The attempts of an RL step, each as long as the harness allows."""
    generated = min(recipe.harness.max_generated_tokens, recipe.harness.context_tokens)
    return RolloutWork(
        attempts=_attempts(recipe),
        prompt_tokens=recipe.harness.context_tokens - generated,
        generated_tokens=generated,
        longest_generated_tokens=generated,
        tool_seconds=inputs.costs.tool_seconds,
        publish_precision=recipe.learning.publish_precision,
    )


def _attempts(recipe: Recipe) -> int:
    return recipe.rollout.group_size * recipe.rollout.groups_per_step


class StageHours(Record):
    """GPU time of a stage: steps x seconds per step x GPUs."""

    steps: float
    step_seconds: float
    gpus: int
    gpu_hours: float
    price: float | None = Field(description="None: no price of a GPU-hour was given")

    @classmethod
    def of(cls, steps: float, step_seconds: float, gpus: int, price: float | None) -> "StageHours":
        """The hours of a stage. `price`: per GPU-hour."""
        hours = steps * step_seconds * gpus / SECONDS_PER_HOUR
        return cls(
            steps=steps,
            step_seconds=step_seconds,
            gpus=gpus,
            gpu_hours=hours,
            price=None if price is None else hours * price,
        )


class RecipePlan(Record):
    """A recipe on a cluster: layouts, placements of RL, memory, time."""

    recipe: str
    parameters: int
    gpus: int = Field(description="all GPUs; pretraining uses each, RL at most so many")
    chip_memory_gib: float
    pretraining: TrainingPlan
    placements: dict[str, RlPlacement] = Field(
        description="RL by placement, if it fits; this version does not run colocated"
    )
    refusals: dict[str, str] = Field(description="reasons why the other placements do not fit")
    options: dict[str, str | None] = Field(
        description="options that set a stage's layout; None: the stage does not support this layout yet"
    )
    publish: PublishBytes
    needs: PublishNeeds
    simulated: dict[int, SimulatedRun] = Field(
        description="simulated runs of the separate placement, by the bound on staleness; empty if it does not fit"
    )
    hours: dict[str, StageHours] = Field(
        description="GPU-hours of pretraining and of each placement of RL, without MTP and evaluations"
    )
    dry_runs: dict[str, DryRunResult] = Field(default={}, description="dry runs by stage")

    @property
    def reinforcement(self) -> str:
        """The placement whose details are shown: separate if it fits."""
        return SEPARATE if SEPARATE in self.placements else COLOCATED

    @property
    def complaint(self) -> str:
        """The mismatch between dry run and plan. Empty when they agree, or without a dry run."""
        return find_mismatch([stage for run in self.dry_runs.values() for stage in run.stages])


def plan_recipe(
    recipe: Recipe,
    gpus: int,
    chip: str,
    degrees: Sequence[str],
    *,
    is_dry_run: bool,
    price: float | None = None,
    what_if: str | None = None,
) -> RecipePlan:
    """Layouts, ranks, memory, time and replicas. `degrees` fix the layout of both stages; without them the
    fastest layout that fits is searched for each stage. ConfigError says why nothing fits. `is_dry_run`: also
    builds one rank of each pipeline stage on the meta device and walks a step. `what_if`: bounds on staleness to
    simulate, such as staleness=0,1,2.
    """
    bounds = () if what_if is None else parse_bounds(what_if)
    plan = make_plan(recipe, gpus, load_inputs(chip), parse_degrees(degrees), price, bounds)
    if bounds and not plan.simulated:
        raise ConfigError(
            f"--what-if simulates the separate placement, which does not fit: {plan.refusals[SEPARATE]}"
        )
    if not is_dry_run:
        return plan
    training = plan.placements[plan.reinforcement].training
    walked = {
        "pretraining": walk_step(recipe.model, plan.pretraining, recipe.pretraining.optimizer),
        "reinforcement": walk_step(recipe.model, training, recipe.learning.optimizer),
    }
    return plan.model_copy(update={"dry_runs": walked})


def parse_degrees(texts: Sequence[str]) -> dict[str, int]:
    """Degrees of a layout by axis. ConfigError lists the known axes."""
    degrees: dict[str, int] = {}
    for text in texts:
        axis, _, number = text.partition("=")
        if axis not in AXES or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"--layout {text!r}, wanted AXIS=NUMBER with an axis of {list(AXES)}")
        degrees[axis] = int(number)
    return degrees


def parse_bounds(text: str) -> tuple[int, ...]:
    """Bounds on staleness of a text such as staleness=0,1,2. ConfigError for another text."""
    name, _, numbers = text.partition("=")
    bounds = numbers.split(",")
    known = {str(bound) for bound in range(MAX_BOUND + 1)}
    if name != "staleness" or not known.issuperset(bounds):
        raise ConfigError(
            f"--what-if {text!r:.80}, wanted staleness=NUMBER,NUMBER,... with numbers up to {MAX_BOUND}"
        )
    return tuple(int(bound) for bound in bounds)


def make_plan(
    recipe: Recipe,
    gpus: int,
    inputs: Inputs,
    degrees: dict[str, int],
    price: float | None = None,
    bounds: Sequence[int] = (),
) -> RecipePlan:
    """The plan of a recipe on `gpus` GPUs of a chip. `price`: per GPU-hour. `bounds`: on staleness, to simulate; the
    recipe's and a wider one when there are none.
    """
    spec = recipe.model
    pretraining = _plan(spec, gpus, pretraining_work(recipe), inputs, degrees)
    placements, refusals = _place(recipe, gpus, inputs, degrees)
    # number of steps of the planned size for the tokens of all phases
    steps = _planned_tokens(recipe) / pretraining.work.step_tokens
    hours = {"pretraining": StageHours.of(steps, pretraining.step.seconds, gpus, price)}
    for name, placement in placements.items():
        hours[f"RL, {name}"] = StageHours.of(
            recipe.reinforcement.max_steps, placement.step_seconds, placement.gpus, price
        )
    options = {"pretraining": settings_of("pretraining", pretraining)}
    if separate := placements.get(SEPARATE):
        options["reinforcement"] = settings_of("reinforcement", separate.training)
    learning = recipe.learning
    publish = publish_bytes(spec, inputs.costs, learning.publish_precision)
    return RecipePlan(
        recipe=recipe.name,
        parameters=num_parameters(spec),
        gpus=gpus,
        chip_memory_gib=inputs.chip.memory_gib,
        pretraining=pretraining,
        placements=placements,
        refusals=refusals,
        options=options,
        publish=publish,
        needs=publish_needs(
            publish,
            next(iter(placements.values())).training.layout.world_size,
            earlier=learning.parity.earlier_versions,
            newest=learning.keep_chain_versions,
            anchor_every=learning.anchor_every_versions,
        ),
        simulated=_simulate(recipe, separate, inputs, bounds) if separate else {},
        hours=hours,
    )


def _place(
    recipe: Recipe, gpus: int, inputs: Inputs, degrees: dict[str, int]
) -> tuple[dict[str, RlPlacement], dict[str, str]]:
    """RL by placement, and the reasons why the others do not fit. ConfigError if none does."""
    spec, training = recipe.model, learning_work(recipe)
    work = ReinforcementWork(
        training=training,
        rollouts=rollout_work(recipe, inputs),
        steps_ahead=recipe.rollout.staleness.max_staleness_versions,
        evaluation_replicas=0 if recipe.reinforcement.evaluation.every_steps is None else 1,
    )

    def estimate(size: int) -> list[TrainingPlan]:
        if not degrees:
            return estimate_layouts(spec, size, training, inputs)
        return [estimate_training(spec, _layout(size, degrees), training, inputs)]

    unit = math.prod(degrees.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    trainers = plan_trainers(gpus, unit, estimate)
    placements: dict[str, RlPlacement] = {}
    refusals: dict[str, str] = {}
    for name, place in PLACEMENTS.items():
        try:
            placements[name] = place(spec, gpus, work, trainers, inputs)
        except ConfigError as error:
            refusals[name] = str(error)
    if not placements:
        reasons = ". ".join(f"{name.capitalize()}: {reason}" for name, reason in refusals.items())
        raise ConfigError(f"no placement of RL fits on {gpus} GPUs. {reasons}")
    return placements, refusals


def _simulate(
    recipe: Recipe, placement: RlPlacement, inputs: Inputs, bounds: Sequence[int]
) -> dict[int, SimulatedRun]:
    """Simulated runs by their bound on staleness. Without bounds: the recipe's and a wider one."""
    load = SimulatedLoad.of_plan(
        placement.rollouts,
        rollout_work(recipe, inputs),
        recipe.rollout,
        step_seconds=placement.training.step.seconds + placement.fixed_seconds,
        publish_seconds=placement.swap_seconds,
    )
    bound = load.rollout.staleness.max_staleness_versions
    wanted = bounds or (bound, WIDER * max(1, bound))
    return {limit: Simulation(load.with_bound(limit)).run() for limit in wanted}


def walk_step(spec: ModelSpec, plan: TrainingPlan, optimizer: OptimizerConfig) -> DryRunResult:
    """Builds one rank of each pipeline stage on the meta device and walks one step, in a child process."""
    settings = optimizer.model_dump(include=set(OptimizerConfig.model_fields))
    request = DryRunRequest(
        spec=spec,
        layout=plan.layout,
        work=plan.work,
        optimizer=OptimizerConfig.model_validate(settings),
    )
    with tempfile.TemporaryDirectory(prefix="ostinato-dry-run-") as directory:
        return run_child(DRY_RUN, request, DryRunResult, directory=Path(directory))


def find_mismatch(stages: Sequence[DryRunStage]) -> str:
    """Text about a stage with another number of parameters than planned. Empty when all match."""
    for stage in stages:
        if abs(stage.difference_ratio) > LARGEST_DIFFERENCE_RATIO:
            return (
                f"a rank of stage {stage.stage} holds {stage.built:,} parameters as built and {stage.planned:,} "
                f"as planned, wanted a difference of at most {LARGEST_DIFFERENCE_RATIO:.1%}"
            )
    return ""


def _plan(
    spec: ModelSpec, gpus: int, work: TrainingWork, inputs: Inputs, degrees: dict[str, int]
) -> TrainingPlan:
    if not degrees:
        return search_layout(spec, gpus, work, inputs)
    return plan_training(spec, _layout(gpus, degrees), work, inputs)


def _layout(gpus: int, degrees: Mapping[str, int]) -> ParallelLayout:
    try:
        return ParallelLayout.over(gpus, **degrees)
    except ValueError as error:
        raise ConfigError(f"layout of {gpus} GPUs: {error}") from None


def settings_of(stage: str, plan: TrainingPlan) -> str | None:
    """Options that set a stage's planned layout. None: the stage does not support all of its axes."""
    section, axes = SECTIONS[stage]
    degrees = plan.layout.model_dump(include=set(AXES), exclude_defaults=True)
    if not degrees.keys() <= axes:
        return None
    settings = {"world_size": str(plan.layout.world_size)}
    settings |= {f"layout.{axis}": str(degree) for axis, degree in degrees.items()}
    settings |= {"recompute": "true"} if plan.work.recompute else {}
    return " ".join(f"--set {section}.{name}={value}" for name, value in settings.items())
