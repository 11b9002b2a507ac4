"""Optimiser states as ranks save them together, seen whole."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import Tensor

from ostinato.models.checkpoint.resume import load_parts, main_parts, write_parts, writing_group
from ostinato.models.network.build import TrainerModel
from ostinato.models.training.optimizer import CombinedOptimizer, sharded_state

State = dict[str, Tensor]


def save_state(folder: Path, model: TrainerModel, optimizer: CombinedOptimizer) -> State:
    """Every rank's parts in a folder, and what they are together."""
    write_parts(folder, main_parts(sharded_state(model, optimizer, {})), {}, writing_group())
    dist.barrier()  # the first rank has given the folder its name
    return read_state(folder)


def read_state(folder: Path) -> State:
    """Whole tensors of a folder of parts, by kind and parameter."""
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {key: one for key, one in loaded.items() if isinstance(one, Tensor)}


def load_state(folder: Path, model: TrainerModel, optimizer: CombinedOptimizer) -> None:
    """Takes up this rank's parts of what was saved. The weights are to be imported afterwards."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # of no gradient: the optimiser allocates its state
    optimizer.zero_grad()
    saved = read_state(folder)
    load_parts(folder, [part for part in sharded_state(model, optimizer, {}) if part.key in saved])
