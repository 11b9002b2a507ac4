"""Tables of a plan for the terminal."""

from rich.console import Console

from ostinato.flows.commands.planning import COLOCATED, SECONDS_PER_HOUR, SEPARATE, RecipePlan
from ostinato.flows.reporting.tables import print_table
from ostinato.models.decode.config import Precision
from ostinato.models.layout import ParallelLayout
from ostinato.tasks.planning.dry_run_records import DryRunResult, Exchange
from ostinato.tasks.planning.placements import RlPlacement
from ostinato.tasks.planning.plan import TrainingPlan, describe

SHOWN_RANKS = 64
GIGA = 1e9
GIB = 2**30
PLANNED_ONLY = "planned only, not run by this version"
NOTE = (
    "An estimate with products in bf16, or all in FP8 where precision is mx128. Half of the published figures that it was "
    "not fitted to are within 12 % of it; short steps of RL are planned far too slow (docs/cluster-plan.md)."
)
# docs/lab-log.md, 2026-11-27: ablations of nano, three seeds for the bounds, one for the ages
COST_OF_AGE = (
    "What age costs, measured on nano: bounds of 2 to 32 at a mean age of 1.2 versions -0.8 points of held-out solve rate, "
    "which may be chance; a mean age of 3.9 versions -4.0 [-6.7, -1.3], of 9.5 versions -18.8 [-23.6, -14.0]."
)


SMALLER_DELTAS = (
    "in fp32 nearly all weights change in a step; --set learning.publish_precision=bf16 sends those whose rounded value "
    "changes"
)


def show(plan: RecipePlan, console: Console) -> None:
    """Prints a plan."""
    console.out(f"{plan.recipe}: {plan.parameters / 1e9:.2f} G parameters", highlight=False)
    placement = plan.placements[plan.reinforcement]
    _show_training("pretraining", plan.pretraining, plan, console)
    _show_training("reinforcement", placement.training, plan, console)
    _show_rollouts(plan, placement, console)
    if plan.simulated:
        _show_simulation(plan, console)
    _show_hours(plan, console)
    _show_comparison(plan, console)
    console.out(NOTE, highlight=False)
    plans = {"pretraining": plan.pretraining, "reinforcement": placement.training}
    for name, found in plan.dry_runs.items():
        _show_dry_run(name, found, plans[name], console)


def _show_training(name: str, plan: TrainingPlan, whole: RecipePlan, console: Console) -> None:
    again = ", layers recomputed" if plan.work.recompute else ""
    title = f"\n{name} on {plan.layout.world_size} GPUs: {describe(plan.layout)}{again}"
    console.out(title, highlight=False)
    if (options := whole.options.get(name)) is not None:
        console.out(options, highlight=False)
    _show_ranks(plan.layout, console)
    _show_memory(plan, whole.chip_memory_gib, console)
    step, sent = plan.step, plan.step.sent
    console.out(
        f"step {step.seconds:.2f} s: compute {step.compute_seconds:.2f}, memory {step.memory_seconds:.2f}, "
        f"launches at least {step.launch_seconds:.2f}, transfers {step.transfer_seconds:.2f}, "
        f"bubble {step.bubble_seconds:.2f}, optimiser {step.optimizer_seconds:.2f}, "
        f"log-prob passes {step.forward_seconds:.2f}, longer in RL {step.reinforcement_seconds:.2f}; "
        f"MFU {step.mfu:.1%} of bf16",
        highlight=False,
    )
    parts = ", ".join(f"{axis} {size / GIGA:.2f}" for axis, size in sent.model_dump().items())
    console.out(f"GB sent by a rank per step: {parts}", highlight=False)


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


def _show_rollouts(plan: RecipePlan, placement: RlPlacement, console: Console) -> None:
    rollouts, publish, needs = placement.rollouts, plan.publish, plan.needs
    replica, is_separate = rollouts.replica, plan.reinforcement == SEPARATE
    where = "on other GPUs" if is_separate else f"on the same GPUs ({PLANNED_ONLY})"
    options = (
        f"; options --set decoding.gpus_per_replica={replica.gpus} "
        f"--set reinforcement.engine_replicas={rollouts.replicas}"
    )
    console.out(
        f"\nrollouts {where}: replicas of {rollouts.replicas} x {replica.gpus} GPUs, each with "
        f"{replica.concurrent_attempts} attempts at once, {replica.step_seconds * 1000:.1f} ms per token; "
        f"{rollouts.sandboxes} sandboxes; rollouts of a step take {rollouts.step_seconds:.0f} s"
        f"{options if is_separate else ''}",
        highlight=False,
    )
    console.out(
        f"a publish in {publish.precision} moves {publish.anchor / GIGA:.1f} GB whole, {publish.delta / GIGA:.2f} GB as a delta; "
        f"engines have it after {placement.swap_seconds:.2f} s, {placement.swap_seconds / placement.step_seconds:.1%} of a "
        "step",
        highlight=False,
    )
    if publish.precision is Precision.FP32:
        console.out(SMALLER_DELTAS, highlight=False)
    console.out(
        f"host memory of versions: {needs.rank_host_bytes / GIGA:.1f} GB per trainer rank, "
        f"{needs.replica_host_bytes / GIGA:.1f} GB per replica; disk of versions: up to {needs.chain_bytes / GIGA:,.0f} GB",
        highlight=False,
    )


def _show_simulation(plan: RecipePlan, console: Console) -> None:
    """Prints simulated runs of the planned replicas by their bound on staleness."""
    placement = plan.placements[SEPARATE]
    seconds = {
        bound: (placement.training.step.seconds + placement.fixed_seconds)
        / (1 - found.trainer_idle_ratio)
        for bound, found in plan.simulated.items()
    }
    rows = [
        {
            "max_staleness_versions": bound,
            "seconds per step": f"{seconds[bound]:.1f}",
            "steps per hour": f"{SECONDS_PER_HOUR / seconds[bound]:,.1f}",
            **({"of synchronous": f"{seconds[0] / seconds[bound]:.2f}x"} if 0 in seconds else {}),
            "trainer idle": f"{found.trainer_idle_ratio:.0%}",
            "mean staleness": f"{found.staleness_mean:.1f}",
            "slots busy": f"{found.slots_busy_ratio:.0%}",
        }
        for bound, found in plan.simulated.items()
    ]
    replicas = placement.rollouts.replicas
    title = f"simulated: {replicas} replicas, lengths of attempts log-normal"
    print_table(console, rows, title)
    console.out(COST_OF_AGE, highlight=False)


def _show_hours(plan: RecipePlan, console: Console) -> None:
    """Prints the GPU-hours of each stage and of the chain, with prices if a price per GPU-hour is given."""
    rows = [
        {
            "stage": name,
            "steps": f"{hours.steps:,.0f}",
            "seconds per step": f"{hours.step_seconds:.2f}",
            "steps per hour": f"{SECONDS_PER_HOUR / hours.step_seconds:,.1f}",
            "GPUs": f"{hours.gpus:,}",
            "GPU-hours": f"{hours.gpu_hours:,.1f}",
            **({} if hours.price is None else {"price": f"{hours.price:,.2f}"}),
        }
        for name, hours in plan.hours.items()
    ]
    both = [plan.hours["pretraining"], plan.hours[f"RL, {plan.reinforcement}"]]
    chain = dict.fromkeys(rows[0], "") | {"stage": f"chain, {plan.reinforcement}"}
    chain["GPU-hours"] = f"{sum(hours.gpu_hours for hours in both):,.1f}"
    prices = [hours.price for hours in both if hours.price is not None]
    chain |= {"price": f"{sum(prices):,.2f}"} if prices else {}
    title = "RL includes its replicas; waiting for long attempts (simulated), MTP and evaluations are left out"
    print_table(console, [*rows, chain], title)


def _show_comparison(plan: RecipePlan, console: Console) -> None:
    """Prints the parts of a step in each placement, and which placement is faster."""
    for name, found in plan.placements.items():
        training, rollouts = found.training.step.seconds, found.rollouts.step_seconds
        parts = f"training {training:.2f}, at once rollouts {rollouts:.2f}"
        if name == COLOCATED:
            parts = (
                f"rollouts {rollouts:.2f} + training {training:.2f} + swap {found.swap_seconds:.2f}"
            )
        remarks = {
            PLANNED_ONLY: name == COLOCATED,
            "the engine's weights are loaded again for each step": found.reloads_engine,
            "an engine over several nodes is not run by this version": found.spans_nodes,
        }
        text = "".join(f"; {remark}" for remark, is_true in remarks.items() if is_true)
        console.out(
            f"{name}: a step takes {found.step_seconds:.2f} s on {found.gpus} GPUs ({parts}, and "
            f"{found.fixed_seconds:.0f} fixed), at most "
            f"{found.memory_gib:.1f} GiB per GPU of the trainer{text}",
            highlight=False,
        )
    for name, reason in plan.refusals.items():
        console.out(f"{name} does not fit: {reason}", highlight=False)
    if len(plan.placements) > 1:
        slow, fast = sorted(plan.placements, key=lambda name: -plan.placements[name].step_seconds)
        ratio = plan.placements[slow].step_seconds / plan.placements[fast].step_seconds
        remark = f"; {COLOCATED} is {PLANNED_ONLY}"
        console.out(f"faster: {fast}, {ratio:.2f} times as fast as {slow}{remark}", highlight=False)


def _show_dry_run(name: str, found: DryRunResult, plan: TrainingPlan, console: Console) -> None:
    title = f"\ndry run of {name}, {describe(plan.layout)}: {found.wall_seconds:.0f} s"
    console.out(title, highlight=False)
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
            console.out(f"stage {stage.stage}: same as the previous stage", highlight=False)
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
