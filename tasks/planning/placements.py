"""Placements of an RL step on a number of GPUs.

Separate: the trainer has some GPUs and the engine replicas the others, and both work at once. Colocated:
both use the same GPUs in turns, first for rollouts, then for training. This version runs separate
placement only; colocation is arithmetic. Reference and trainer share GPUs in both.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Costs, Inputs, RolloutWork, TrainingWork
from ostinato.tasks.planning.plan import DEGREES, TrainingPlan, describe
from ostinato.tasks.planning.publishing import publish_bytes
from ostinato.tasks.planning.rollouts import RolloutPlan, estimate_replica, plan_rollouts
from ostinato.tasks.planning.shapes import GIB, model_parameters

_Estimate = TypeVar("_Estimate")
SIZE_FACTORS = (1, 3, 5)  # numbers of trainer GPUs that are tried are these times powers of two


class ReinforcementWork(Record):
    """Work of one RL step."""

    training: TrainingWork
    rollouts: RolloutWork
    steps_ahead: int = Field(ge=0, description="bound on staleness; 0: rollouts wait for each step")
    evaluation_replicas: int = Field(
        default=0, ge=0, description="replicas that only evaluate; counted with separate placement"
    )


class RlPlacement(Record):
    """Trainer and engine replicas on GPUs."""

    gpus: int = Field(description="GPUs in all, those for evaluation included")
    training: TrainingPlan
    rollouts: RolloutPlan
    memory_gib: float = Field(
        description="memory of the fullest trainer GPU; colocated with the engine's weights, without caches"
    )
    swap_seconds: float = Field(description="seconds until the engines have new weights")
    reloads_engine: bool = Field(
        default=False, description="whether training needs the memory of the engine's weights"
    )
    spans_nodes: bool = Field(
        default=False,
        description="whether an engine is on several nodes, which this version does not run",
    )
    fixed_seconds: float = Field(description="seconds of a step beside training, rollouts and swap")
    step_seconds: float


def fixed_seconds(costs: Costs, *, shares_gpus: bool) -> float:
    """Seconds of each RL step beside its parts; more if trainer and engines take turns on the same GPUs."""
    return costs.rl_fixed_seconds + (costs.rl_switch_seconds if shares_gpus else 0.0)


def step_seconds(
    training: float, generation: float, swap: float, fixed: float, *, at_once: bool
) -> float:
    """Seconds of an RL step from those of its parts. `at_once`: the next rollouts are generated, and the last weights
    swapped, while the trainer computes.
    """
    return fixed + (max(training, generation) if at_once else training + generation + swap)


Trainers = dict[int, Sequence[TrainingPlan]]
"""Steps of trainers under their layouts, by number of GPUs."""


def plan_trainers(
    gpus: int, unit: int, estimate: Callable[[int], Sequence[TrainingPlan]]
) -> Trainers:
    """Trainers on at most `gpus` GPUs. `unit`: divisor of their numbers of GPUs. The numbers do not depend on
    `gpus`, so that more GPUs never give a slower plan. `estimate` raises ConfigError for a number that divides
    nothing; if all do, so does this.
    """
    sizes = sorted(unit * factor << power for factor in SIZE_FACTORS for power in range(16))
    found: Trainers = {}
    refusal = ConfigError(f"a trainer takes a multiple of {unit} GPUs, wanted at most {gpus}")
    for size in sizes:
        if size > gpus:
            break
        try:
            found[size] = estimate(size)
        except ConfigError as error:
            refusal = error
    if not found:
        raise refusal
    return found


def place_separately(
    spec: ModelSpec, gpus: int, work: ReinforcementWork, trainers: Trainers, inputs: Inputs
) -> RlPlacement:
    """The fastest split of at most `gpus` GPUs; of equally fast ones that with the fewest GPUs. ConfigError
    says what does not fit.
    """
    if gpus < 2:
        raise ConfigError(f"{gpus} GPU, wanted at least 2: one for the trainer, one for a replica")
    fitting = _fitting(trainers, gpus - 1, inputs)
    fits = functools.partial(estimate_replica, spec, work=work.rollouts, inputs=inputs)
    sizes = _replicas(spec, inputs, fits)
    found: list[RlPlacement] = []
    for (size, plans), replica_gpus in itertools.product(fitting.items(), sizes):
        most = (gpus - size) // replica_gpus - work.evaluation_replicas
        if most > 0:
            fastest = min(plans, key=lambda plan: plan.step.seconds)
            found.append(_split(spec, fastest, (replica_gpus, most), work, inputs))
    if not found:
        engines = (1 + work.evaluation_replicas) * min(sizes)
        raise ConfigError(
            f"a trainer takes at least {min(fitting)} GPUs and its replicas {engines}, wanted at most "
            f"{gpus} together"
        )
    return min(found, key=lambda one: (one.step_seconds, one.gpus))


def place_colocated(
    spec: ModelSpec, gpus: int, work: ReinforcementWork, trainers: Trainers, inputs: Inputs
) -> RlPlacement:
    """The fastest colocation on at most `gpus` GPUs. ConfigError says what does not fit."""
    found: list[RlPlacement] = []
    refusal = ConfigError("no size of a replica was tried")
    for plans in _fitting(trainers, gpus, inputs).values():
        for plan in _frontier(plans):
            place = functools.partial(colocate, spec, plan, work=work.rollouts, inputs=inputs)
            try:
                found += _replicas(spec, inputs, place, plan.layout.world_size).values()
            except ConfigError as error:
                refusal = error
    if not found:
        raise refusal
    return min(found, key=lambda one: (one.step_seconds, one.gpus))


def colocate(
    spec: ModelSpec, plan: TrainingPlan, replica_gpus: int, work: RolloutWork, inputs: Inputs
) -> RlPlacement:
    """Replicas on the GPUs of a trainer, in turns. What the trainer needs between steps stays in memory. If the
    engine's weights do not fit into memory in training, they are loaded again for each step. Raises ConfigError
    if weights and one attempt do not fit in rollouts.
    """
    gpus, held_gib = plan.layout.world_size, plan.lasting_gib
    rollouts = plan_rollouts(spec, gpus, replica_gpus, work, inputs, held_gib=held_gib)
    engine_gib = 2 * model_parameters(spec) / replica_gpus / GIB
    kept_gib = plan.fullest.total_gib + engine_gib
    reloads = kept_gib > inputs.chip.memory_gib
    publish = publish_bytes(spec, inputs.costs, work.publish_precision)
    swap = publish.anchor_seconds(replica_gpus, inputs)
    swap = swap if reloads else min(swap, publish.delta_seconds(inputs))
    fixed = fixed_seconds(inputs.costs, shares_gpus=True)
    seconds = step_seconds(plan.step.seconds, rollouts.step_seconds, swap, fixed, at_once=False)
    return RlPlacement(
        gpus=gpus,
        training=plan,
        rollouts=rollouts,
        memory_gib=max(plan.fullest.total_gib if reloads else kept_gib, held_gib + engine_gib),
        swap_seconds=swap,
        reloads_engine=reloads,
        spans_nodes=replica_gpus > inputs.chip.gpus_per_node,
        fixed_seconds=fixed,
        step_seconds=seconds,
    )


def _split(
    spec: ModelSpec,
    plan: TrainingPlan,
    replicas: tuple[int, int],
    work: ReinforcementWork,
    inputs: Inputs,
) -> RlPlacement:
    """A trainer with the fewest replicas that give the fastest step. `replicas`: GPUs of one, largest number."""
    gpus, most = replicas
    ahead, trains = work.steps_ahead, plan.step.seconds
    publish = publish_bytes(spec, inputs.costs, work.rollouts.publish_precision)
    swap = publish.delta_seconds(inputs)
    fixed = fixed_seconds(inputs.costs, shares_gpus=False)

    def rollouts(count: int) -> RolloutPlan:
        total = count * gpus
        return plan_rollouts(spec, total, gpus, work.rollouts, inputs, steps_at_once=max(1, ahead))

    def seconds(count: int) -> float:
        generates = rollouts(count).step_seconds
        return step_seconds(trains, generates, swap, fixed, at_once=ahead > 0)

    slowest_first = range(1, most + 1)
    place = bisect.bisect_left(slowest_first, -seconds(most), key=lambda count: -seconds(count))
    fewest = min(place + 1, most)
    return RlPlacement(
        gpus=plan.layout.world_size + (fewest + work.evaluation_replicas) * gpus,
        training=plan,
        rollouts=rollouts(fewest),
        memory_gib=plan.fullest.total_gib,
        swap_seconds=swap,
        spans_nodes=gpus > inputs.chip.gpus_per_node,
        fixed_seconds=fixed,
        step_seconds=seconds(fewest),
    )


def _fitting(trainers: Trainers, most: int, inputs: Inputs) -> Trainers:
    """The trainers on at most so many GPUs that fit. ConfigError names the one that needs the least memory."""
    small = {size: plans for size, plans in trainers.items() if size <= most}
    found = {size: [plan for plan in plans if plan.fits(inputs)] for size, plans in small.items()}
    if any(found.values()):
        return {size: plans for size, plans in found.items() if plans}
    if not small:
        raise ConfigError(f"a trainer takes {min(trainers)} GPUs, wanted at most {most}")
    least = min((one for plans in small.values() for one in plans), key=_needed_gib)
    raise ConfigError(
        f"a trainer on at most {most} GPUs needs {_needed_gib(least):.1f} GiB per GPU, wanted at most "
        f"{inputs.chip.memory_gib:.1f}: on {least.layout.world_size}, {describe(least.layout)}"
    )


def _needed_gib(plan: TrainingPlan) -> float:
    return plan.fullest.total_gib


def _frontier(plans: Sequence[TrainingPlan]) -> Iterator[TrainingPlan]:
    """The plans than which no faster one needs less memory, in training or between steps."""
    total = lasting = math.inf
    for plan in sorted(plans, key=lambda plan: plan.step.seconds):
        if plan.fullest.total_gib < total or plan.lasting_gib < lasting:
            yield plan
        total, lasting = min(total, plan.fullest.total_gib), min(lasting, plan.lasting_gib)


def _replicas(
    spec: ModelSpec, inputs: Inputs, estimate: Callable[[int], _Estimate], most: int = DEGREES[-1]
) -> dict[int, _Estimate]:
    """Estimates by a replica's number of GPUs, for the numbers that divide the model and hold it. An engine
    spans several nodes only if one node is too small. Raises ConfigError if none holds it.
    """
    found: dict[int, _Estimate] = {}
    refusal = ConfigError(f"an engine of at most {most} GPUs cannot divide the model")
    node = inputs.chip.gpus_per_node
    for gpus in DEGREES:
        if gpus > most or (gpus > node and found):
            break
        if spec.num_query_groups % min(gpus, node):
            continue
        try:
            found[gpus] = estimate(gpus)
        except ConfigError as error:
            refusal = error
    if not found:
        raise refusal
    return found
