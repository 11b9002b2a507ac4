"""Transformer Engine by switch: which modules, why not here, and, on a GPU, what they compute."""

from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as megatron_engine
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils

from ostinato.models.device import current_device
from ostinato.models.network import trunk
from ostinato.models.network.build import block_modules, build_trainer_model
from ostinato.models.network.mixed import mixed_context
from ostinato.models.network.transformer_engine import (
    FIRST_CAPABILITY,
    EngineRecipe,
    engine_options,
    refuse_engine,
    trunk_modules,
    why_no_engine,
)
from ostinato.models.process_groups import close_process_groups, open_process_groups
from tests.fakes.chosen_device import DEVICE
from tests.fakes.short_training import losses_of_steps
from tests.unit.tasks.pretraining.test_layouts import SPECS

QWEN3_MOE, DEEPSEEK_V3 = SPECS["qwen3_moe"], SPECS["deepseek_v3"]


def test_switch_puts_its_modules_at_every_place_but_the_experts() -> None:
    block = block_modules(SPECS["nano"], "mxfp8")
    specs: Any = block.layer_specs
    dense, sparse = (layer.submodules for layer in specs)
    attention = dense.self_attention.submodules
    assert attention.linear_qkv is megatron_engine.TEColumnParallelLinear
    assert attention.linear_proj is megatron_engine.TERowParallelLinear
    assert attention.core_attention is megatron_engine.TEDotProductAttention
    assert dense.mlp.submodules.linear_fc1 is megatron_engine.TEColumnParallelLinear
    norms = [
        block.layer_norm,
        dense.input_layernorm,
        dense.pre_mlp_layernorm,
        attention.q_layernorm,
    ]
    assert all(norm is megatron_engine.TENorm for norm in norms)
    plain: Any = block_modules(SPECS["nano"]).layer_specs
    assert sparse.mlp is plain[1].submodules.mlp


def test_engine_is_refused_with_the_reason() -> None:
    for device in (torch.device("cpu"), DEVICE):
        assert f"the device is {device.type}, wanted cuda" in str(why_no_engine(device))
        with pytest.raises(ValueError, match=f"'bf16': the device is {device.type}"):
            refuse_engine(device, "bf16", "bf16", QWEN3_MOE)
    with pytest.raises(ValueError, match="latent attention"):
        refuse_engine(DEVICE, "mxfp8", "bf16", DEEPSEEK_V3)
    with pytest.raises(ValueError, match="'fp32' of the experts, wanted bf16"):
        refuse_engine(DEVICE, "blockwise", "fp32", QWEN3_MOE)
    refuse_engine(DEVICE, None, "fp32", DEEPSEEK_V3)


def test_routers_multiply_in_torch_where_transformer_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its product wants CUDA, where a trainer may be on the CPU."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "te_general_gemm", refuse, raising=False)
    close_process_groups()
    open_process_groups(kind="cpu")
    model = build_trainer_model(QWEN3_MOE)
    model.token_logprobs(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    close_process_groups()


def test_weights_drawn_on_the_cpu_train_on_the_chosen_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron tells Transformer Engine's modules, which need a GPU, to draw theirs there."""

    class Column(ColumnParallelLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.to_empty(device="cpu")

    class Row(RowParallelLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.to_empty(device="cpu")

    local = trunk_modules(None)
    modules = local._replace(column_linear=Column, row_linear=Row)
    monkeypatch.setattr(trunk, "trunk_modules", lambda _: modules)
    close_process_groups()
    open_process_groups(kind="meta")
    model = build_trainer_model(QWEN3_MOE, engine="bf16")
    assert {weight.device for weight in model.parameters()} == {current_device()} == {DEVICE}
    close_process_groups()


def test_recipes_are_megatrons() -> None:
    assert engine_options("bf16") == {}
    fresh = {
        "disable_parameter_transpose_cache": True
    }  # else FP8 weights are those of the first step
    assert engine_options("blockwise") == {"fp8": "e4m3", "fp8_recipe": "blockwise"} | fresh
    assert engine_options("delayed") == {"fp8": "hybrid", "fp8_recipe": "delayed"} | fresh


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", list(FIRST_CAPABILITY))
def test_twice_the_weight_gives_twice_the_output(recipe: EngineRecipe) -> None:
    if (reason := why_no_engine(torch.device("cuda"), recipe)) is not None:
        pytest.skip(reason)
    spec = QWEN3_MOE.model_copy(update={"hidden_size": 128, "head_dim": 32})
    close_process_groups()
    open_process_groups(kind="cuda")
    model = build_trainer_model(spec, precision="bf16", engine=recipe)
    linear = model.layers[0].self_attention.linear_proj
    input_TBD = torch.randn(128, 1, linear.weight.shape[1], device="cuda")
    outputs = []
    for factor in (1, 2):
        with torch.no_grad():
            linear.weight.mul_(factor)
        for _ in range(2):  # delayed: a call scales by what those before it saw
            with mixed_context(True), get_fp8_context(model.trunk.config):
                output = linear(input_TBD)[0].float()
        outputs.append(output)
    assert (outputs[1] - 2 * outputs[0]).norm() < 0.05 * outputs[1].norm()
    close_process_groups()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", list(FIRST_CAPABILITY))
def test_engine_learns_as_the_local_layers_do(recipe: EngineRecipe) -> None:
    if (reason := why_no_engine(torch.device("cuda"), recipe)) is not None:
        pytest.skip(reason)
    spec = QWEN3_MOE.model_copy(update={"hidden_size": 128, "head_dim": 32, "vocab_size": 64})
    close_process_groups()
    open_process_groups(kind="cuda")
    tokens_BT = torch.randint(0, 64, (4, 64), device="cuda")
    losses = []
    for engine in (None, recipe):
        model = build_trainer_model(spec, precision="bf16", engine=engine)
        losses.append(losses_of_steps(model, tokens_BT, 5))
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if recipe == "bf16" else 0.05)
    close_process_groups()
