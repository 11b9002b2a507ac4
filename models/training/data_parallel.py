"""Ranks of a stage as processes of this machine, and the flat gradient of RL's ranks.

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

from ostinato.models.device import DeviceKind, current_device
from ostinato.models.layout import ParallelLayout
from ostinato.models.process_groups import close_process_groups, open_process_groups

Request = TypeVar("Request")
Answer = TypeVar("Answer")

EXIT_WAIT_SECONDS = 60


class UsedGradients:
    """The gradients of a model as views of one buffer. What no rank used has no gradient after
    `reduce`, as on one rank: the optimiser passes over it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = torch.zeros(total + len(self.parameters), device=current_device())
        self.uses = self.buffer[total:]
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_use, index))
        self.clear()

    def clear(self) -> None:
        """Zeroes gradients and makes the parameters accumulate here."""
        self.buffer.zero_()
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def reduce(self) -> None:
        """Sums gradients over all ranks."""
        if dist.get_world_size() > 1:
            dist.all_reduce(self.buffer)
        for parameter, num_users in zip(self.parameters, self.uses.tolist(), strict=True):
            if not num_users:
                parameter.grad = None

    def _note_use(self, index: int, _: torch.Tensor) -> None:
        self.uses[index] = 1.0


def run_ranks(
    function: Callable[[Request, int], Answer],
    request: Request,
    layout: ParallelLayout,
    directory: Path,
    kind: DeviceKind = "cpu",
) -> Answer:
    """Runs `function(request, rank)` in the processes of `layout` with open process groups, each on its
    device, and returns rank 0's answer.

    Rank 0 is this process. A rank that dies makes the others fail in their next collective.
    `directory` takes the file they meet in. Groups this process had open before are closed.
    """
    close_process_groups()
    rendezvous = directory / f"rendezvous-{uuid.uuid4().hex}"
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=_run_rank, args=(function, request, rank, layout, rendezvous, kind), daemon=True
        )
        for rank in range(1, layout.world_size)
    ]
    try:
        for process in others:
            process.start()
        open_process_groups(0, layout.world_size, rendezvous, layout=layout, kind=kind)
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
    layout: ParallelLayout,
    rendezvous: Path,
    kind: DeviceKind,
) -> None:
    open_process_groups(rank, layout.world_size, rendezvous, layout=layout, kind=kind)
    function(request, rank)
