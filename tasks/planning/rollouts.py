"""Engine replicas: attempts that fit, rate of generation, and the number that a trainer needs."""

import math

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.spec import ModelSpec
from ostinato.tasks.planning.inputs import Inputs, RolloutWork
from ostinato.tasks.planning.shapes import GIB, model_parameters, token_operations

TERA = 1e12


class Replica(Record):
    """One engine replica under full load."""

    gpus: int
    concurrent_attempts: int
    step_seconds: float
    attempts_per_second: float


class RolloutPlan(Record):
    """Replicas of a placement."""

    replica: Replica
    replicas: int
    sandboxes: int = Field(description="attempts in flight, each with its own box")
    step_seconds: float = Field(description="seconds of rollouts for one step")


def key_value_bytes(spec: ModelSpec) -> int:
    """Bytes of one token in the cache, bf16."""
    return 2 * spec.cached_size * spec.num_layers


def estimate_replica(
    spec: ModelSpec,
    gpus: int,
    work: RolloutWork,
    inputs: Inputs,
    *,
    most_attempts: int | None = None,
    held_gib: float = 0.0,
) -> Replica:
    """Rate of a replica on `gpus` chips, on each of which a trainer holds `held_gib`. Raises ConfigError if
    the weights and one attempt do not fit.
    """
    chip, costs = inputs.chip, inputs.costs
    weights = 2 * model_parameters(spec)
    usable_gib = chip.memory_gib * costs.engine_memory_share - held_gib
    free = gpus * usable_gib * GIB - weights
    cache = work.context_tokens * key_value_bytes(spec)
    fitting = math.floor(free / cache)
    if fitting < 1:
        trainer = f" and {held_gib:.1f} GiB of the trainer on each" if held_gib else ""
        raise ConfigError(
            f"an engine replica of {gpus} GPUs has {free / GIB:.1f} GiB beside {weights / GIB:.1f} GiB "
            f"of weights{trainer}, wanted {cache / GIB:.2f} GiB for one attempt of "
            f"{work.context_tokens:.0f} tokens; give it more GPUs"
        )
    slots = min(fitting, costs.engine_slots, most_attempts or fitting)
    step = decode_step_seconds(spec, gpus, slots, work, inputs)
    operations = token_operations(spec, work.context_tokens).all
    rate = gpus * chip.bf16_teraflops * TERA * inputs.rates.bf16_products
    prefill = work.prompt_tokens * operations / rate
    seconds = work.generated_tokens * step / slots + prefill
    return Replica(
        gpus=gpus, concurrent_attempts=slots, step_seconds=step, attempts_per_second=1 / seconds
    )


def decode_step_seconds(
    spec: ModelSpec, gpus: int, slots: int, work: RolloutWork, inputs: Inputs
) -> float:
    """Seconds of one token of each of `slots` attempts: caches and used weights are read once,
    experts that no token chose are not read.
    """
    expert = 3 * spec.num_moe_layers * spec.num_experts * spec.hidden_size * spec.expert_hidden_size
    chosen_share = 0.0
    if spec.num_experts:
        chosen_share = 1 - (1 - spec.experts_per_token / spec.num_experts) ** slots
    read = 2 * (model_parameters(spec) - expert + expert * chosen_share)
    # on average an attempt is half generated
    held = work.prompt_tokens + work.generated_tokens / 2
    read += slots * held * key_value_bytes(spec)
    bandwidth = gpus * inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.decode
    # the token attends to all held tokens, which is the average over a row twice as long
    operations = slots * token_operations(spec, 2 * held).all
    peak = gpus * inputs.chip.bf16_teraflops * TERA * inputs.rates.bf16_products
    return max(read / bandwidth, operations / peak) + inputs.costs.engine_step_seconds


def generation_seconds(
    spec: ModelSpec,
    gpus: int,
    replica_gpus: int,
    work: RolloutWork,
    inputs: Inputs,
    *,
    held_gib: float = 0.0,
) -> float:
    """Seconds until all attempts of one step are done on `gpus` chips: total work or the longest attempt."""
    share = math.ceil(work.attempts / (gpus // replica_gpus))
    replica = estimate_replica(
        spec, replica_gpus, work, inputs, most_attempts=share, held_gib=held_gib
    )
    alone = decode_step_seconds(spec, replica_gpus, 1, work, inputs)
    longest = work.longest_generated_tokens * alone
    return max(share / replica.attempts_per_second, longest) + work.tool_seconds


def plan_rollouts(
    spec: ModelSpec,
    gpus: int,
    replica_gpus: int,
    work: RolloutWork,
    inputs: Inputs,
    *,
    steps_at_once: int = 1,
    held_gib: float = 0.0,
) -> RolloutPlan:
    """Replicas on `gpus` chips that generate the attempts of so many steps at once. Raises ConfigError if the
    weights and one attempt do not fit. An attempt that waits for its tools holds a box, but no slot.
    """
    replicas, attempts = gpus // replica_gpus, steps_at_once * work.attempts
    many = work.model_copy(update={"attempts": attempts})
    seconds = generation_seconds(spec, gpus, replica_gpus, many, inputs, held_gib=held_gib)
    share = math.ceil(attempts / replicas)
    return RolloutPlan(
        replica=estimate_replica(
            spec, replica_gpus, work, inputs, most_attempts=share, held_gib=held_gib
        ),
        replicas=replicas,
        sandboxes=attempts,
        step_seconds=seconds / steps_at_once,
    )
