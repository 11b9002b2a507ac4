"""AdamW with moments sharded over a parameter's holders (ZeRO stage 1, arXiv 1910.02054).

Each parameter has one owner, the only rank that keeps its moments, updates it and sends it to the
others. The result equals that of one rank, bit for bit.

Megatron's distributed optimizer needs a CUDA device. torch's ZeroRedundancyOptimizer supports only
one group of ranks, while dense parameters and experts have different groups here, and it writes a
rank's state in its own format.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.models.network.parallel.shards import state_replica_group


class ShardedAdamW(torch.optim.AdamW):
    """AdamW over the parameters that this rank owns. All ranks step it together."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        fused: bool,
    ) -> None:
        self.all_parameters = list(parameters)
        self._owners = _assign_owners(self.all_parameters)
        owned = [
            parameter
            for parameter, owner in zip(self.all_parameters, self._owners, strict=True)
            if owner == _rank_among_holders(parameter)
        ]
        # as a group, since torch refuses an empty list and a rank may own no parameter
        super().__init__(
            [{"params": owned}], lr=lr, betas=betas, weight_decay=weight_decay, fused=fused
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter, on all ranks."""
        super().step()
        sent = [self._send(index, parameter) for index, parameter in enumerate(self.all_parameters)]
        for work in sent:
            if work is not None:
                work.wait()

    def _send(self, index: int, tensor: Tensor) -> dist.Work | None:
        """Begins to send a tensor from the owner of parameter `index` to the parameter's other holders."""
        group = state_replica_group(self.all_parameters[index])
        if group is None or group.size() == 1:
            return None
        source = dist.get_global_rank(group, self._owners[index])
        return dist.broadcast(tensor, src=source, group=group, async_op=True)


def _rank_among_holders(parameter: Tensor) -> int:
    group = state_replica_group(parameter)
    return 0 if group is None else group.rank()


def _assign_owners(parameters: list[Tensor]) -> list[int]:
    """The owner of each parameter, as its rank among the holders. Parameters are assigned largest
    first, each to the rank with the fewest elements.
    """
    owners = [0] * len(parameters)
    loads: dict[dist.ProcessGroup, list[int]] = {}
    for index in sorted(range(len(parameters)), key=lambda one: -parameters[one].numel()):
        group = state_replica_group(parameters[index])
        if group is not None:
            load = loads.setdefault(group, [0] * group.size())
            owners[index] = min(range(len(load)), key=load.__getitem__)
            load[owners[index]] += parameters[index].numel()
    return owners
