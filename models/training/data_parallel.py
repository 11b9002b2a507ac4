"""Data-parallel training without Megatron's CUDA-only optimiser: one flat gradient, one collective
a step.

It does not decide when to stop: callers agree on step counts beforehand, since a rank that stops
alone leaves the others waiting.
"""

import functools
import multiprocessing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ostinato.models.cpu import close_process_groups, open_process_groups

Request = TypeVar("Request")
Answer = TypeVar("Answer")

EXIT_WAIT_SECONDS = 60


class FlatGradients:
    """The gradients of a model as views of one buffer, with room for statistics behind them."""

    def __init__(self, model: torch.nn.Module, num_statistics: int) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = torch.zeros(total + num_statistics)
        self.gradients = self.buffer[:total]
        self.statistics = self.buffer[total:]
        self.clear()

    def clear(self) -> None:
        """Zeroes gradients and statistics and makes the parameters accumulate here."""
        self.buffer.zero_()
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def reduce(self) -> None:
        """Sums gradients and statistics over all ranks."""
        if dist.get_world_size() > 1:
            dist.all_reduce(self.buffer)

    def clip(self, largest_norm: float | None) -> float:
        """Scales gradients down to `largest_norm` (None: never). Returns their norm before."""
        norm = float(self.gradients.norm())
        if largest_norm is not None and norm > largest_norm:
            self.gradients.mul_(largest_norm / norm)
        return norm


class UsedGradients(FlatGradients):
    """As FlatGradients, but what no rank used has no gradient after `reduce`, as on one rank: the
    optimiser passes over it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, sum(parameter.requires_grad for parameter in model.parameters()))
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_use, index))

    def reduce(self) -> None:
        """Sums gradients over all ranks."""
        super().reduce()
        for parameter, num_users in zip(self.parameters, self.statistics.tolist(), strict=True):
            if not num_users:
                parameter.grad = None

    def _note_use(self, index: int, _: torch.Tensor) -> None:
        self.statistics[index] = 1.0


def run_ranks(
    function: Callable[[Request, int], Answer], request: Request, world_size: int, directory: Path
) -> Answer:
    """Runs `function(request, rank)` in `world_size` processes with open process groups and returns
    rank 0's answer.

    Rank 0 is this process. A rank that dies makes the others fail in their next collective.
    `directory` takes the file they meet in. Groups this process had open before are closed.
    """
    close_process_groups()
    rendezvous = directory / f"rendezvous-{uuid.uuid4().hex}"
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=_run_rank, args=(function, request, rank, world_size, rendezvous), daemon=True
        )
        for rank in range(1, world_size)
    ]
    try:
        for process in others:
            process.start()
        open_process_groups(0, world_size, rendezvous)
        answer = function(request, 0)
        for process in others:
            process.join(EXIT_WAIT_SECONDS)
        return answer
    finally:
        for process in others:
            if process.is_alive():
                process.kill()
        close_process_groups()
        rendezvous.unlink(missing_ok=True)


def _run_rank(
    function: Callable[[Request, int], Answer],
    request: Request,
    rank: int,
    world_size: int,
    rendezvous: Path,
) -> None:
    open_process_groups(rank, world_size, rendezvous)
    function(request, rank)
