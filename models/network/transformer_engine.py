"""Modules of a trunk's layers: Megatron's with our kernels, or NVIDIA's Transformer Engine.

No other module imports Transformer Engine. It computes on CUDA only, in bf16 or FP8 under
`mixed_context` (`mixed.py`); weights stay fp32. Routers and experts are ours in both cases.
"""

import importlib
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules

from ostinato.models.network.attention.core import BlockCoreAttention
from ostinato.models.network.mixed import ColumnLinear
from ostinato.models.network.norm import RootMeanSquareNorm
from ostinato.models.spec import ModelSpec

EngineRecipe = Literal["bf16", "delayed", "tensorwise", "blockwise", "mxfp8"]
# The first compute capability whose tensor cores run a recipe: Ada, Ada, Hopper, Blackwell.
FIRST_CAPABILITY = {
    "bf16": (8, 0),
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}


class TrunkModules(NamedTuple):
    """Class of each kind of module in a layer."""

    column_linear: Any
    row_linear: Any
    norm: Any
    core_attention: Any

    @property
    def mlp(self) -> MLPSubmodules:
        """The modules of a dense MLP."""
        return MLPSubmodules(linear_fc1=self.column_linear, linear_fc2=self.row_linear)


def trunk_modules(recipe: EngineRecipe | None) -> TrunkModules:
    """Transformer Engine's modules for a recipe; local modules for None. Norms are separate modules
    in both, so weights have the same names.
    """
    if recipe is None:
        return TrunkModules(ColumnLinear, RowParallelLinear, RootMeanSquareNorm, BlockCoreAttention)
    engine = TESpecProvider()
    return TrunkModules(
        engine.column_parallel_linear(),
        engine.row_parallel_linear(),
        engine.layer_norm(rms_norm=True),
        engine.core_attention(),
    )


def engine_options(recipe: EngineRecipe | None) -> dict[str, Any]:
    """Fields of Megatron's configuration that make its layers compute in FP8. The cache of FP8
    weights is off: only Megatron's schedules refresh it, so a forward pass outside of them would
    read weights of an earlier step.
    """
    if recipe in (None, "bf16"):
        return {}
    return {
        "fp8": "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3",
        "fp8_recipe": recipe,
        "disable_parameter_transpose_cache": True,
    }


def why_no_engine(device: torch.device, recipe: EngineRecipe = "bf16") -> str | None:
    """Reason why Transformer Engine cannot run a recipe on a device. None: it can."""
    if device.type != "cuda":
        return f"the device is {device.type}, wanted cuda (OSTINATO_DEVICE) and an NVIDIA GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # its libraries raise the last two
        return f"transformer_engine.pytorch cannot be imported ({error}); pip install '.[gpu]'"
    seen, wanted = torch.cuda.get_device_capability(device), FIRST_CAPABILITY[recipe]
    if seen < wanted:
        return f"{recipe} on compute capability {seen}, wanted {wanted} or higher"
    return None


def refuse_engine(
    device: torch.device, recipe: EngineRecipe | None, precision: str, spec: ModelSpec
) -> None:
    """Raises ValueError if a model cannot be trained with Transformer Engine."""
    if recipe is None:
        return
    reason = why_no_engine(device, recipe)
    if spec.latent is not None:
        reason = "the model has latent attention, whose modules are local; wanted none"
    elif spec.num_experts and precision == "fp32":
        reason = "precision='fp32' of the experts, wanted bf16, mx32 or mx128"
    if reason is not None:
        raise ValueError(f"transformer_engine={recipe!r}: {reason}")
