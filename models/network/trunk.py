"""Megatron's configuration and modules for a model shape and the open process groups."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.device import current_device, token_dispatcher
from ostinato.models.network.attention.latent import LatentSelfAttention
from ostinato.models.network.experts import SortedMoELayer, TrunkConfig
from ostinato.models.network.parallel.context import context_ranks
from ostinato.models.network.routing import ReplayRouter
from ostinato.models.network.transformer_engine import (
    EngineRecipe,
    TrunkModules,
    engine_options,
    trunk_modules,
)
from ostinato.models.spec import ModelSpec

EMBEDDING_STD = 0.02


def megatron_config(
    spec: ModelSpec,
    precision: PrecisionName = "fp32",
    engine: EngineRecipe | None = None,
    *,
    is_whole: bool = False,
) -> TrunkConfig:
    """Megatron's configuration of a shape under the layout of the open process groups. With
    `is_whole` every pipeline stage has all layers.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    stages = 1 if is_whole else parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() if stages > 1 else None
    return TrunkConfig(
        spec=spec,
        precision=precision,
        engine=engine,
        **engine_options(engine),
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        # with interleaved chunks on two stages both neighbours are one rank; only NCCL has batches
        batch_p2p_comm=chunks is None and current_device().type == "cuda",
        overlap_p2p_comm=chunks is not None,
        batch_p2p_sync=False,  # torch no longer needs this wait for CUDA
        context_parallel_size=context_ranks(),
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,  # without it every rank would run the experts on all tokens
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        calculate_per_token_loss=True,  # gradients are summed; the loop divides by target tokens
        moe_router_bias_update_rate=0.0,  # `RankRouters.balance` moves it
        **shape_options(spec),
        moe_router_topk=spec.experts_per_token,
        moe_router_score_function="sigmoid",  # Megatron's bias needs it; ReplayRouter follows the spec
        moe_router_enable_expert_bias=True,
        layernorm_epsilon=spec.norm_epsilon,
        add_qkv_bias=spec.qkv_bias,
        init_method_std=spec.hidden_size**-0.5,
        embedding_init_method_std=EMBEDDING_STD,
    )


def shape_options(spec: ModelSpec) -> dict[str, Any]:
    """Fields of Megatron's configuration with which its own modules compute a shape on a CPU."""
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.dense_hidden_size or spec.expert_hidden_size,
        "num_moe_experts": spec.num_experts or None,
        "moe_ffn_hidden_size": spec.expert_hidden_size or None,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": token_dispatcher(current_device()),
        "normalization": "RMSNorm",
        "qk_layernorm": spec.qk_norm,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
    }


def block_modules(
    spec: ModelSpec, engine: EngineRecipe | None = None
) -> TransformerBlockSubmodules:
    """Modules of the trunk: Megatron's, except for core attention, norms and experts."""
    modules = trunk_modules(engine)
    dense = ModuleSpec(
        module=MLP, submodules=modules.mlp, params={"ffn_hidden_size": spec.dense_hidden_size}
    )
    layers = [_layer_modules(spec, dense, modules)] * spec.num_dense_layers
    layers += [_layer_modules(spec, SortedMoELayer, modules)] * spec.num_moe_layers
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.norm)


def _layer_modules(
    spec: ModelSpec, mlp: ModuleSpec | type[SortedMoELayer], modules: TrunkModules
) -> ModuleSpec:
    return ModuleSpec(
        module=RecomputableLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=_attention_modules(spec, modules),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            pre_mlp_layernorm=modules.norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        ),
    )


def _attention_modules(spec: ModelSpec, modules: TrunkModules) -> ModuleSpec:
    if spec.latent is not None:
        return ModuleSpec(module=LatentSelfAttention)
    head_norm: Any = modules.norm if spec.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.column_linear,
            core_attention=modules.core_attention,
            linear_proj=modules.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


class RecomputableLayer(TransformerLayer):
    """Megatron's layer. With `is_recomputed` it keeps only its input for backward and runs forward
    again there (arXiv 1604.06174), with the experts that the first forward pass chose.

    Megatron's own checkpoint function reads CUDA's random state. This layer draws nothing at
    random, so torch's function works on every device.
    """

    is_recomputed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's outputs, with checkpointing if `is_recomputed`."""
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(
            super().forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._forward_and_again,
            # an early stop could skip a layer's last collectives on some ranks only
            early_stop=False,
            **kwargs,
        )

    def _forward_and_again(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        router = getattr(self.mlp, "router", None)
        if not isinstance(router, ReplayRouter):
            return nullcontext(), nullcontext()
        chosen: list[Tensor] = []
        return _keeping(router, chosen), _repeating(router, chosen)


@contextmanager
def _keeping(router: ReplayRouter, chosen: list[Tensor]) -> Iterator[None]:
    """Makes a router append its chosen experts to `chosen`."""
    router.chosen = chosen
    try:
        yield
    finally:
        router.chosen = None


@contextmanager
def _repeating(router: ReplayRouter, chosen: list[Tensor]) -> Iterator[None]:
    """Makes a router choose the same experts again."""
    [router.repeated_NK] = chosen
    try:
        yield
    finally:
        router.repeated_NK = None
