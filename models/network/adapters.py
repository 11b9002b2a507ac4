"""Low-rank adapters beside frozen linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685).

A layer's output becomes W x + (alpha / R) B A x. A is drawn at random and B begins as zeros, so
that training begins with the unchanged model. Attention, dense MLPs and shared experts get
adapters; embedding, norms, routers and routed experts do not.

Shapes: R rank, I inputs, O outputs of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

from ostinato.models.checkpoint.adapter_files import TrainedAdapter
from ostinato.models.device import current_device
from ostinato.models.network.canonical import split_qkv

if TYPE_CHECKING:
    from ostinato.models.network.build import TrainerModel


class Adapter(torch.nn.Module):
    """The low-rank update of one linear layer."""

    def __init__(self, weight_OI: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        outputs, inputs = weight_OI.shape
        bound = inputs**-0.5
        drawn_RI = weight_OI.new_empty(rank, inputs).uniform_(-bound, bound)
        self.down_RI = torch.nn.Parameter(drawn_RI)
        self.up_OR = torch.nn.Parameter(weight_OI.new_zeros(outputs, rank))
        self.rank, self.alpha = rank, alpha
        self.scale = alpha / rank

    def forward(self, inputs: Tensor) -> Tensor:
        """The update of the layer's output."""
        return linear(linear(inputs, self.down_RI), self.up_OR) * self.scale

    def update_OI(self) -> Tensor:
        """The update of the layer's weight when both are merged."""
        return self.up_OR @ self.down_RI * self.scale


def attach_adapters(model: "TrainerModel", rank: int, alpha: float, seed: int) -> None:
    """Freezes `model` and gives its linear layers adapters drawn from `seed`. Weights must be
    imported before, and the layout must not shard them.
    """
    named = {id(tensor): name for name, tensor in model.canonical_tensors().items()}
    model.requires_grad_(False)
    device = current_device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for layer in model.layers:
            for module in layer.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    weight: Any = module.weight
                    adapter = Adapter(weight, rank, alpha)
                    model.adapters[_key(named[id(weight)])] = adapter
                    module.register_forward_hook(_adding(adapter))


def _adding(adapter: Adapter) -> Any:
    def add(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        output, bias = outputs  # Megatron's linear layers return the bias separately
        return output + adapter(inputs[0]), bias

    return add


def merge_update(adapters: torch.nn.ModuleDict, name: str, weight: Tensor) -> Tensor:
    """The canonical weight `name` with its adapter merged, if it has one."""
    key = _key(name)
    if key not in adapters:
        return weight
    adapter: Any = adapters[key]
    return weight + adapter.update_OI()


def trained_adapter(model: "TrainerModel") -> TrainedAdapter | None:
    """Clones of the adapters on the CPU. None if all weights are trained."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    adapter: Any = None
    for key, adapter in model.adapters.items():
        name, values = key.replace("/", "."), adapter.state_dict()
        down_RI, up_OR = (values[half].to("cpu", copy=True) for half in ("down_RI", "up_OR"))
        if "qkv_proj" not in name:
            found[name] = (down_RI, up_OR)
            continue
        for part, rows in zip("qkv", split_qkv(up_OR, model.spec), strict=True):
            found[name.replace("qkv_proj", f"{part}_proj")] = (down_RI.clone(), rows.clone())
    return TrainedAdapter(found, adapter.rank, adapter.alpha) if found else None


@contextmanager
def weights_put_back(model: "TrainerModel") -> Iterator[None]:
    """Restores weights and adapters bit for bit on exit, so that others may be imported within."""
    live = model.canonical_tensors() | model.adapters.state_dict()
    kept = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(kept[name])


def _key(name: str) -> str:
    """The name of a weight in a `ModuleDict`, which allows no dots."""
    return name.replace(".", "/")
