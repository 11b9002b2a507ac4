"""`ostinato plan`: layout, memory, time and replicas of a recipe on a number of GPUs."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console

from ostinato.flows.recipe import Recipe
from ostinato.flows.reporting.tables import print_table
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.dry_run_records import (
    LARGEST_DIFFERENCE_RATIO,
    DryRunRequest,
    DryRunResult,
    DryRunStage,
    Exchange,
)
from ostinato.tasks.planning.inputs import Inputs, RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.plan import (
    PublishBytes,
    TrainingPlan,
    describe,
    plan_training,
    publish_bytes,
    search_layout,
    search_replica,
)
from ostinato.tasks.planning.rollouts import RolloutPlan
from ostinato.tasks.planning.simulation import SimulatedLoad, SimulatedRun, Simulation
from ostinato.tasks.pretraining.config import PretrainingLayout
from ostinato.tasks.reinforcement.learning.config import LearningLayout

# recipe section of each training stage, and the axes of its layout
SECTIONS = {
    "pretraining": ("pretraining", PretrainingLayout.model_fields.keys()),
    "reinforcement": ("learning", LearningLayout.model_fields.keys()),
}
SHOWN_RANKS = 64
AXES = ("tensor", "pipeline", "interleave", "context", "expert", "expert_tensor")
GIGA = 1e9
GIB = 2**30
SECONDS_PER_HOUR = 3600
WIDER = 16  # staleness bound of the second simulated row, times the recipe's
DRY_RUN = "ostinato.tasks.planning.dry_run:main"
NOTE = (
    "An estimate of what the hardware allows with products in bf16, or all in FP8 where precision is mx128. Compared "
    "with published figures it is mostly too fast, by half (docs/cluster-plan.md)."
)


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
    return TrainingWork(
        row_tokens=longest,
        attended_tokens=longest,
        microbatch_tokens=max(longest, recipe.learning.packing.microbatch_tokens),
        step_tokens=_attempts(recipe) * longest,
        forward_passes=1 if recipe.learning.objective.kl_coefficient else 0,
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
    """A recipe on a cluster: layouts, memory, time, replicas."""

    recipe: str
    parameters: int
    gpus: int
    chip_memory_gib: float
    pretraining: TrainingPlan
    reinforcement: TrainingPlan
    options: dict[str, str | None] = Field(
        description="options that set a stage's layout; None: the stage does not support this layout yet"
    )
    rollouts: RolloutPlan
    publish: PublishBytes
    simulated: dict[int, SimulatedRun] = Field(
        description="simulated runs of the planned replicas, by the bound on staleness"
    )
    hours: dict[str, StageHours] = Field(
        description="GPU-hours by stage, without trainer idle time, MTP and evaluations"
    )
    dry_run: DryRunResult | None = None

    @property
    def complaint(self) -> str:
        """The mismatch between dry run and plan. Empty when they agree, or without a dry run."""
        return find_mismatch(() if self.dry_run is None else self.dry_run.stages)


def plan_recipe(
    recipe: Recipe,
    gpus: int,
    chip: str,
    degrees: Sequence[str],
    *,
    is_dry_run: bool,
    price: float | None = None,
) -> RecipePlan:
    """Layouts, ranks, memory, time and replicas. `degrees` fix the layout of both stages; without them the
    fastest layout that fits is searched for each stage. ConfigError says why nothing fits. `is_dry_run`: also
    builds one rank of each pipeline stage on the meta device and walks a step.
    """
    plan = make_plan(recipe, gpus, load_inputs(chip), parse_degrees(degrees), price)
    if not is_dry_run:
        return plan
    return plan.model_copy(update={"dry_run": walk_step(recipe, plan.pretraining)})


def parse_degrees(texts: Sequence[str]) -> dict[str, int]:
    """Degrees of a layout by axis. ConfigError lists the known axes."""
    degrees: dict[str, int] = {}
    for text in texts:
        axis, _, number = text.partition("=")
        if axis not in AXES or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"--layout {text!r}, wanted AXIS=NUMBER with an axis of {list(AXES)}")
        degrees[axis] = int(number)
    return degrees


def make_plan(
    recipe: Recipe,
    gpus: int,
    inputs: Inputs,
    degrees: dict[str, int],
    price: float | None = None,
) -> RecipePlan:
    """The plan of a recipe on `gpus` GPUs of a chip. `price`: per GPU-hour."""
    spec = recipe.model
    pretraining = _plan(spec, gpus, pretraining_work(recipe), inputs, degrees)
    learning = _plan(spec, gpus, learning_work(recipe), inputs, degrees)
    work, seconds = rollout_work(recipe, inputs), learning.step.seconds
    rollouts = search_replica(spec, work, seconds, inputs)
    publish = publish_bytes(spec, inputs)
    load = SimulatedLoad.of_plan(
        rollouts,
        work,
        recipe.rollout,
        step_seconds=seconds,
        publish_seconds=publish.delta_seconds(inputs),
    )
    bound = load.rollout.staleness.max_staleness_versions
    bounds = (bound, WIDER * max(1, bound))
    plans = {"pretraining": pretraining, "reinforcement": learning}
    options = {name: settings_of(name, plan) for name, plan in plans.items()}
    # number of steps of the planned size for the tokens of all phases
    steps = _planned_tokens(recipe) / pretraining.work.step_tokens
    rl_gpus = gpus + rollouts.replicas * rollouts.replica.gpus
    hours = {
        "pretraining": StageHours.of(steps, pretraining.step.seconds, gpus, price),
        "reinforcement": StageHours.of(recipe.reinforcement.max_steps, seconds, rl_gpus, price),
    }
    return RecipePlan(
        recipe=recipe.name,
        parameters=num_parameters(spec),
        gpus=gpus,
        chip_memory_gib=inputs.chip.memory_gib,
        pretraining=pretraining,
        reinforcement=learning,
        options=options,
        rollouts=rollouts,
        publish=publish,
        simulated={limit: Simulation(load.with_bound(limit)).run() for limit in bounds},
        hours=hours,
    )


def show(plan: RecipePlan, console: Console) -> None:
    """Prints a plan."""
    console.print(f"{plan.recipe}: {plan.parameters / 1e9:.2f} G parameters", highlight=False)
    _show_training("pretraining", plan.pretraining, plan, console)
    _show_training("reinforcement", plan.reinforcement, plan, console)
    _show_rollouts(plan.rollouts, plan.publish, console)
    _show_simulation(plan, console)
    _show_hours(plan.hours, console)
    console.print(NOTE, highlight=False, soft_wrap=True)
    if plan.dry_run is not None:
        _show_dry_run(plan.dry_run, plan.pretraining, console)


def walk_step(recipe: Recipe, plan: TrainingPlan) -> DryRunResult:
    """Builds one rank of each pipeline stage on the meta device and walks one pretraining step, in a child process."""
    request = DryRunRequest(
        spec=recipe.model,
        layout=plan.layout,
        work=plan.work,
        optimizer=recipe.pretraining.optimizer,
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


def _show_dry_run(found: DryRunResult, plan: TrainingPlan, console: Console) -> None:
    title = f"\ndry run of pretraining, {describe(plan.layout)}: {found.wall_seconds:.0f} s"
    console.print(title, highlight=False, soft_wrap=True)
    stages = [
        {
            "stage": stage.stage,
            "parameters built": f"{stage.built:,}",
            "planned": f"{stage.planned:,}",
            "apart": f"{stage.difference_ratio:+.2%}",
            "GiB of weights": f"{stage.weight_bytes / GIB:.2f}",
            "gradients": f"{stage.gradient_bytes / GIB:.2f}",
            "optimiser": f"{stage.optimizer_bytes / GIB:.2f}",
        }
        for stage in found.stages
    ]
    title = "one rank per stage, in fp32 in this version; AdamW's state is sharded over data parallelism"
    print_table(console, stages, title)
    shown: tuple[Exchange, ...] = ()
    for stage in found.stages:
        if stage.exchanges == shown:
            console.print(f"stage {stage.stage}: same as the previous stage", highlight=False)
            continue
        shown = stage.exchanges
        rows = [
            {
                "phase": exchange.phase,
                "collective": exchange.operation,
                "ranks": exchange.group_ranks,
                "calls": exchange.calls,
                "GB sent": f"{exchange.sent_bytes / GIGA:.3f}",
            }
            for exchange in shown
        ]
        step = f"a rank's step in stage {stage.stage}, {found.microbatches} microbatches"
        print_table(console, rows, step)


def _plan(
    spec: ModelSpec, gpus: int, work: TrainingWork, inputs: Inputs, degrees: dict[str, int]
) -> TrainingPlan:
    if not degrees:
        return search_layout(spec, gpus, work, inputs)
    try:
        layout = ParallelLayout.over(gpus, **degrees)
    except ValueError as error:
        raise ConfigError(f"layout of {gpus} GPUs: {error}") from None
    return plan_training(spec, layout, work, inputs)


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


def _show_training(name: str, plan: TrainingPlan, whole: RecipePlan, console: Console) -> None:
    again = ", layers recomputed" if plan.work.recompute else ""
    console.print(f"\n{name}: {describe(plan.layout)}{again}", highlight=False, soft_wrap=True)
    if (options := whole.options[name]) is not None:
        console.print(options, highlight=False, soft_wrap=True)
    _show_ranks(plan.layout, console)
    _show_memory(plan, whole.chip_memory_gib, console)
    step, sent = plan.step, plan.step.sent
    console.print(
        f"step {step.seconds:.2f} s: compute {step.compute_seconds:.2f}, memory {step.memory_seconds:.2f}, "
        f"launches at least {step.launch_seconds:.2f}, transfers {step.transfer_seconds:.2f}, "
        f"bubble {step.bubble_seconds:.2f}, optimiser {step.optimizer_seconds:.2f}, "
        f"log-prob passes {step.forward_seconds:.2f}; MFU {step.mfu:.1%} of bf16",
        highlight=False,
        soft_wrap=True,
    )
    parts = ", ".join(f"{axis} {size / GIGA:.2f}" for axis, size in sent.model_dump().items())
    console.print(f"GB sent by a rank per step: {parts}", highlight=False, soft_wrap=True)


def _show_ranks(layout: ParallelLayout, console: Console) -> None:
    axes, places = ("rank", "TP", "CP", "DP", "PP", "ETP", "EP", "EDP"), layout.places()
    hidden = len(places) > SHOWN_RANKS
    caption = f"first {SHOWN_RANKS} of {len(places)} ranks" if hidden else None
    ranks = [dict(zip(axes, place, strict=True)) for place in places[:SHOWN_RANKS]]
    print_table(console, ranks, caption=caption)


def _show_memory(plan: TrainingPlan, chip_memory_gib: float, console: Console) -> None:
    kinds = ("weights", "grads", "optim", "activ", "logits", "reserve")
    rows: list[dict[str, object]] = []
    for row in plan.memory:
        sizes = row.model_dump(exclude={"stage"}).values()
        gib = dict(zip(kinds, (f"{size:.1f}" for size in sizes), strict=True))
        rows.append({"stage": row.stage, **gib, "total": f"{row.total_gib:.1f}"})
    print_table(console, rows, f"GiB per rank, of {chip_memory_gib:.1f}")


def _show_rollouts(plan: RolloutPlan, publish: PublishBytes, console: Console) -> None:
    replica = plan.replica
    console.print(
        f"\nrollouts beside the trainer: {plan.replicas} replicas of {replica.gpus} GPUs, each with "
        f"{replica.concurrent_attempts} attempts at once, {replica.step_seconds * 1000:.1f} ms per token; "
        f"{plan.sandboxes} sandboxes; all attempts of a step take {plan.attempts_seconds:.0f} s; options "
        f"--set decoding.gpus_per_replica={replica.gpus} --set reinforcement.engine_replicas={plan.replicas}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"a publish moves {publish.anchor / GIGA:.1f} GB whole, {publish.delta / GIGA:.2f} GB as a delta",
        highlight=False,
    )


def _show_simulation(plan: RecipePlan, console: Console) -> None:
    """Prints the simulated run of the planned replicas, with the recipe's bound on staleness and a wider one."""
    rows = [
        {
            "max_staleness_versions": bound,
            "trainer idle": f"{found.trainer_idle_ratio:.0%}",
            "mean staleness": f"{found.staleness_mean:.1f}",
            "slots busy": f"{found.slots_busy_ratio:.0%}",
        }
        for bound, found in plan.simulated.items()
    ]
    title = f"simulated: {plan.rollouts.replicas} replicas, lengths of attempts log-normal"
    print_table(console, rows, title)


def _show_hours(stages: Mapping[str, StageHours], console: Console) -> None:
    """Prints the GPU-hours of each stage and of the chain, with prices if a price per GPU-hour is given."""
    rows = [
        {
            "stage": name,
            "steps": f"{hours.steps:,.0f}",
            "seconds per step": f"{hours.step_seconds:.2f}",
            "GPUs": f"{hours.gpus:,}",
            "GPU-hours": f"{hours.gpu_hours:,.1f}",
            **({} if hours.price is None else {"price": f"{hours.price:,.2f}"}),
        }
        for name, hours in stages.items()
    ]
    chain = {"stage": "chain", "steps": "", "seconds per step": "", "GPUs": ""}
    chain["GPU-hours"] = f"{sum(hours.gpu_hours for hours in stages.values()):,.1f}"
    prices = [hours.price for hours in stages.values() if hours.price is not None]
    chain |= {"price": f"{sum(prices):,.2f}"} if prices else {}
    title = "RL includes its replicas; trainer idle time (above), MTP and evaluations are left out"
    print_table(console, [*rows, chain], title)
