"""Communication between the ranks of a trainer. All ranks make the same calls in the same order."""

from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from ostinato.infra.platform.errors import ClusterError
from ostinato.infra.serving.weights.codec import tensor_bits
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.build import TrainerModel

Value = TypeVar("Value")


def gather_over_ranks(value: Value) -> list[Value]:
    """Values of all ranks, ordered by rank. Every rank gets them."""
    values: list[Any] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast_from_first(value: Value) -> Value:
    """The first rank's value. Every rank gets it."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def checksum_weights(model: TrainerModel) -> str:
    """Checksum of the weights and adapters. It is equal on two ranks if they are equal bit for bit."""
    state = xxhash.xxh3_128()
    for tensor in (model.canonical_tensors() | model.adapters.state_dict()).values():
        state.update(tensor_bits(tensor.detach().cpu()).data)
    return state.hexdigest()


def check_copies_agree(model: TrainerModel, layout: ParallelLayout, when: str) -> None:
    """Raises ClusterError if ranks that hold the same part of the model differ in any bit."""
    if layout.world_size == 1:
        return
    checksums = gather_over_ranks(checksum_weights(model))
    parts: dict[tuple[int, int, int], set[str]] = {}
    for place, checksum in zip(layout.places(), checksums, strict=True):
        parts.setdefault((place.tensor, place.expert, place.pipeline), set()).add(checksum)
    if any(len(seen) > 1 for seen in parts.values()):
        raise ClusterError(
            f"weights of the ranks {when} have checksums {checksums}, wanted one for each part of the model; "
            "the newest step checkpoint is intact"
        )
