"""A training step of ours and of Megatron's own model, for the benchmarks that time them."""

from collections.abc import Callable

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.network.build import build_trainer_model
from ostinato.models.network.transformer_engine import EngineRecipe
from ostinato.models.network.trunk import shape_options
from ostinato.models.spec import ModelSpec
from ostinato.models.training.gradients import LayoutGradients
from ostinato.models.training.optimizer import build_optimizer
from ostinato.models.training.optimizer_config import OptimizerConfig

Step = Callable[[], None]
LEARNING_RATE = 1e-4


def our_step(
    spec: ModelSpec,
    weights: dict[str, Tensor] | None,
    tokens_BT: Tensor,
    *,
    precision: PrecisionName = "fp32",
    engine: EngineRecipe | None = None,
) -> Step:
    """A step as pretraining takes it. Weights None: fresh ones."""
    model = build_trainer_model(spec, precision=precision, engine=engine)
    if weights is not None:
        model.import_weights(weights)
    model.draft.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw"), adam=LEARNING_RATE)
    gradients = LayoutGradients(model)

    def step() -> None:
        gradients.clear()
        logprobs_BT = model.token_logprobs(tokens_BT)
        (-logprobs_BT.sum()).backward()
        gradients.reduce()
        gradients.scale(1 / logprobs_BT.numel())
        optimizer.step()

    return step


def megatron_step(
    spec: ModelSpec,
    tokens_BT: Tensor,
    *,
    engine: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """A step of Megatron's GPT model with its local modules, or Transformer Engine's; weights are its own
    draws.
    """
    device = tokens_BT.device
    config = TransformerConfig(
        **shape_options(spec),
        moe_shared_expert_intermediate_size=spec.shared_expert_hidden_size or None,
        moe_layer_freq=[0] * spec.num_dense_layers + [1] * spec.num_moe_layers,
        moe_router_topk=spec.experts_per_token or 2,
        masked_softmax_fusion=False,
        bias_activation_fusion=engine,
        moe_grouped_gemm=engine,  # its experts are local ones in a loop else
        moe_permute_fusion=engine,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=engine),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_tokens,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=spec.rotary_fraction,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    tokens = tokens_BT.shape[1]
    places_BT = torch.arange(tokens, device=device).expand_as(tokens_BT)
    is_hidden_11TT = ~torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()

    def step() -> None:
        optimizer.zero_grad()
        losses_BT = model(tokens_BT, places_BT, is_hidden_11TT, labels=tokens_BT.roll(-1, 1))
        losses_BT[:, :-1].mean().backward()
        optimizer.step()

    return step
