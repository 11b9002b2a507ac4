"""Engine replicas: attempts that fit, rate of generation, and the number that a trainer needs."""

import math

from pydantic import Field

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.inputs import Inputs, RolloutWork
from ostinato.tasks.planning.shapes import GIB, token_operations

TERA = 1e12


class Replica(Record):
    """One engine replica under full load."""

    gpus: int
    concurrent_attempts: int
    step_seconds: float
    attempts_per_second: float


class RolloutPlan(Record):
    """Replicas that keep a trainer busy."""

    replica: Replica
    replicas: int
    sandboxes: int = Field(description="attempts in flight, each with its own box")
    attempts_seconds: float = Field(description="seconds until all attempts of one step are done")


def key_value_bytes(spec: ModelSpec) -> int:
    """Bytes of one token in the cache, bf16."""
    return 2 * spec.cached_size * spec.num_layers


def estimate_replica(
    spec: ModelSpec, gpus: int, work: RolloutWork, inputs: Inputs, most_attempts: int | None = None
) -> Replica:
    """Rate of a replica on `gpus` chips. Raises ConfigError if the weights and one attempt do not fit."""
    chip, costs = inputs.chip, inputs.costs
    weights = 2 * num_parameters(spec)
    free = gpus * chip.memory_gib * GIB * costs.engine_memory_share - weights
    cache = work.context_tokens * key_value_bytes(spec)
    fitting = math.floor(free / cache)
    if fitting < 1:
        raise ConfigError(
            f"an engine replica of {gpus} GPUs has {free / GIB:.1f} GiB beside "
            f"{weights / GIB:.1f} GiB of weights, wanted {cache / GIB:.2f} GiB for one attempt of "
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
    read = 2 * (num_parameters(spec) - expert + expert * chosen_share)
    # on average an attempt is half generated
    held = work.prompt_tokens + work.generated_tokens / 2
    read += slots * held * key_value_bytes(spec)
    bandwidth = gpus * inputs.chip.memory_terabytes_per_second * TERA * inputs.rates.decode
    # the token attends to all held tokens, which is the average over a row twice as long
    operations = slots * token_operations(spec, 2 * held).all
    peak = gpus * inputs.chip.bf16_teraflops * TERA * inputs.rates.bf16_products
    return max(read / bandwidth, operations / peak) + inputs.costs.engine_step_seconds


def generation_seconds(
    spec: ModelSpec, gpus: int, replica_gpus: int, work: RolloutWork, inputs: Inputs
) -> float:
    """Seconds until all attempts of one step are done on `gpus` chips: total work or the longest attempt."""
    replicas = gpus // replica_gpus
    share = math.ceil(work.attempts / replicas)
    replica = estimate_replica(spec, replica_gpus, work, inputs, share)
    alone = decode_step_seconds(spec, replica_gpus, 1, work, inputs)
    longest = work.longest_generated_tokens * alone
    return max(share / replica.attempts_per_second, longest) + work.tool_seconds


def plan_rollouts(
    spec: ModelSpec, gpus: int, work: RolloutWork, step_seconds: float, inputs: Inputs
) -> RolloutPlan:
    """Replicas that supply a step of `step_seconds` with attempts, and boxes for attempts in flight
    (by Little's law). An attempt that waits for its tools holds a box, but no slot of the engine.
    """
    replica = estimate_replica(spec, gpus, work, inputs)
    wanted = work.attempts / step_seconds
    replicas = math.ceil(wanted / replica.attempts_per_second)
    generating = work.generated_tokens * replica.step_seconds
    return RolloutPlan(
        replica=replica,
        replicas=replicas,
        sandboxes=math.ceil(wanted * (generating + work.tool_seconds)),
        attempts_seconds=generation_seconds(spec, replicas * gpus, gpus, work, inputs),
    )
