"""Memory that a recipe needs on a machine without GPUs, estimated from its numbers.

For `miniature` on two cores it says 2.5 GiB; its processes held 1.7 GiB in pretraining and 2.0 GiB in RL. For `smollm2`
it says 15.0 GiB; the ranks of pretraining held 12.6 GiB, RL's trainer and engine 16.4 GiB.
"""

from ostinato.flows.recipe import Recipe
from ostinato.models.decode.config import Precision
from ostinato.models.layout import ParallelLayout
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.shapes import stage_activation_bytes

_RANK_BYTES = 450 << 20  # of Python with torch and Megatron
_TRAINED_BYTES = 16  # per parameter: fp32 weights, gradients, moments
_SERVED_BYTES = {Precision.FP32: 4, Precision.BF16: 2}
_COMPARED_BYTES = 4  # per parameter of each version that is kept for parity of older tokens
_SERVED_COPIES = 3  # of an engine's weights: packed, as they came, and the next version's
_WIDER = 2  # activations are counted in bf16 and kept in fp32
# Memory of a rank over its counted activations: their gradients, and holes between blocks of many sizes.
# SmolLM2-135M held 3.0 times as much in pretraining, 3.4 times in RL.
_HELD = 3.4
_SERVICES_BYTES = 1 << 30  # Prefect's server, the flow, Ray's own processes, boxes


def estimate_memory(recipe: Recipe) -> dict[str, int]:
    """Bytes by consumer, of the stage that needs most."""
    parameters = num_parameters(recipe.model)
    rows = max(phase.microbatch_tokens for phase in recipe.pretraining.phases)
    pretraining = recipe.pretraining.world_size * _rank_bytes(recipe, parameters, rows)
    learning = recipe.learning
    trained = learning.world_size * _rank_bytes(
        recipe, parameters, learning.packing.microbatch_tokens
    )
    trained += learning.parity.earlier_versions * _COMPARED_BYTES * parameters
    weights = _SERVED_COPIES * _SERVED_BYTES[recipe.decoding.precision] * parameters
    served = recipe.reinforcement.engine_replicas * (_RANK_BYTES + weights)
    stages = (
        {"ranks of pretraining": pretraining},
        {"ranks of RL": trained, "engines": served},
    )
    largest = max(stages, key=lambda parts: sum(parts.values()))
    return {**largest, "services and boxes": _SERVICES_BYTES}


def _rank_bytes(recipe: Recipe, parameters: int, tokens: int) -> int:
    """Of one rank with all of the model, forwards and backwards over so many tokens."""
    token_bytes = _WIDER * stage_activation_bytes(recipe.model, ParallelLayout(), 0)
    logits = 2 * 4 * recipe.model.vocab_size  # and their gradient
    held = _HELD * tokens * (token_bytes + logits)
    return int(_RANK_BYTES + _TRAINED_BYTES * parameters + held)
