"""From a model shape to a trainable Megatron model, and between its weights and the canonical ones.

It neither optimises nor reads files.

Shapes: B batch, T tokens, V vocabulary, D model width, L layers, K experts per token, E experts, N =
T*B (time first).
"""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ostinato.kernels.logprobs.op import token_logprobs
from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.device import current_device
from ostinato.models.network.adapters import merge_update
from ostinato.models.network.attention import BlockCoreAttention
from ostinato.models.network.canonical import join_qkv, layer_tensors, split_qkv
from ostinato.models.network.experts import DENSE_MLP, SortedMoELayer, TrunkConfig
from ostinato.models.network.latent import LatentSelfAttention
from ostinato.models.network.mtp import DraftLayer
from ostinato.models.network.norm import RootMeanSquareNorm
from ostinato.models.network.rope import stretch_frequencies
from ostinato.models.network.routing import ReplayRouter
from ostinato.models.network.shards import cut_mine, find_cut, gather_whole
from ostinato.models.process_groups import open_process_groups
from ostinato.models.spec import ModelSpec, check_shapes

EMBEDDING_STD = 0.02


class ScoreOptions(TypedDict, total=False):
    """Options of `TrainerModel.token_logprobs_and_entropy`, entropy apart."""

    mask_BT: Tensor | None
    padding_BT: Tensor | None
    plausibility_ratio: float
    temperature_B: Tensor | None


class HiddenStateGPT(GPTModel):
    """Megatron's GPT model, stopped before the output matrix."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def megatron_config(spec: ModelSpec, precision: PrecisionName = "fp32") -> TrunkConfig:
    """Translates a shape and the layout of the open process groups into Megatron's configuration."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return TrunkConfig(
        spec=spec,
        precision=precision,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,  # without it every rank would run the experts on all tokens
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,  # experts stay whole
        calculate_per_token_loss=True,  # gradients are summed; the loop divides by target tokens
        moe_router_bias_update_rate=0.0,  # `balance_experts` moves it
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.dense_hidden_size or spec.expert_hidden_size,
        num_moe_experts=spec.num_experts or None,
        moe_ffn_hidden_size=spec.expert_hidden_size or None,
        moe_router_topk=spec.experts_per_token,
        moe_router_score_function="sigmoid",  # with a bias; ReplayRouter scores as the spec says
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_epsilon,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=spec.hidden_size**-0.5,
        embedding_init_method_std=EMBEDDING_STD,
        use_cpu_initialization=True,
    )


def block_modules(spec: ModelSpec) -> TransformerBlockSubmodules:
    """Names the module of each place in the trunk: Megatron's, save core attention and experts."""
    dense = ModuleSpec(
        module=MLP, submodules=DENSE_MLP, params={"ffn_hidden_size": spec.dense_hidden_size}
    )
    layers = [_layer_modules(spec, dense)] * spec.num_dense_layers
    layers += [_layer_modules(spec, SortedMoELayer)] * spec.num_moe_layers
    return TransformerBlockSubmodules(
        layer_specs=layers,
        layer_norm=RootMeanSquareNorm,  # type: ignore[arg-type]
    )


def _layer_modules(spec: ModelSpec, mlp: ModuleSpec | type[SortedMoELayer]) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RootMeanSquareNorm,
            self_attention=_attention_modules(spec),
            self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            pre_mlp_layernorm=RootMeanSquareNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
        ),
    )


def _attention_modules(spec: ModelSpec) -> ModuleSpec:
    if spec.latent is not None:
        return ModuleSpec(module=LatentSelfAttention)
    head_norm: Any = RootMeanSquareNorm if spec.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=BlockCoreAttention,  # type: ignore[arg-type]
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _score_tokens(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, with the vocabulary on one rank or cut over several."""
    if find_cut(head_VD) is None:
        return token_logprobs(hidden_ND, head_VD, targets_N, with_entropy=with_entropy)
    if with_entropy:
        raise ValueError("with_entropy is True under tensor parallelism, wanted False")
    if len(targets_N) == 0:  # still a part of the graph: other ranks' experts wait for it
        return hidden_ND.sum(-1), hidden_ND.new_zeros(0)
    losses_N = vocab_parallel_cross_entropy(hidden_ND @ head_VD.T, targets_N)
    return -losses_N, torch.zeros_like(losses_N)


class TrainerModel(torch.nn.Module):
    """The trunk and its draft layers, spoken to in canonical names and batch-first token ids."""

    def __init__(self, spec: ModelSpec, precision: PrecisionName = "fp32") -> None:
        super().__init__()
        self.spec = spec
        self.trunk = HiddenStateGPT(
            config=megatron_config(spec, precision),
            transformer_layer_spec=block_modules(spec),  # type: ignore[arg-type]
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_sequence_tokens,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            position_embedding_type="none"
            if spec.latent
            else "rope",  # latent heads have their own
            rotary_percent=spec.rotary_fraction,
        )
        self.set_rope_scaling(spec.rope_scaling_factor)
        self.draft = torch.nn.ModuleList(DraftLayer(spec) for _ in range(spec.mtp_depth))
        self.adapters = torch.nn.ModuleDict()  # see adapters.py; empty: all weights are trained

    def set_rope_scaling(self, factor: float) -> None:
        """Divides positions by `factor` from now on. The spec follows."""
        if self.spec.latent is not None:
            if factor != 1:
                raise ValueError(
                    f"rope_scaling_factor={factor}, wanted 1 with latent attention, whose context "
                    "YaRN stretches (latent.yarn)"
                )
            return
        self.spec = self.spec.model_copy(update={"rope_scaling_factor": factor})
        # A new module: Megatron caches the angles of the old one by its identity.
        rotary = RotaryEmbedding(
            kv_channels=self.spec.head_dim,
            rotary_percent=self.spec.rotary_fraction,
            seq_len_interpolation_factor=factor if factor > 1 else None,  # type: ignore[arg-type]
            rotary_base=self.spec.rope_base,  # type: ignore[arg-type]
            use_cpu_initialization=True,
        )
        if self.spec.rope_bands is not None:
            rotary.inv_freq = stretch_frequencies(rotary.inv_freq, self.spec.rope_bands)
        rotary.inv_freq = rotary.inv_freq.to(current_device())
        self.trunk.rotary_pos_emb = rotary

    @property
    def embedding_VD(self) -> Tensor:
        """The embedding."""
        return self.trunk.embedding.word_embeddings.weight

    @property
    def head_VD(self) -> Tensor:
        """The output matrix: the embedding, or one of its own."""
        if self.spec.tied_embeddings:
            return self.embedding_VD
        head: Any = self.trunk.output_layer.weight
        return head

    @property
    def layers(self) -> list[Any]:
        """The trunk's layers, which Megatron types as plain modules."""
        return list(self.trunk.decoder.layers)

    @property
    def routers(self) -> list[ReplayRouter]:
        """The routers, first layer with experts first."""
        return [layer.mlp.router for layer in self.layers[self.spec.num_dense_layers :]]

    def forward_hidden(
        self,
        tokens_BT: Tensor,
        routes_BTLK: Tensor | None = None,
        *,
        padding_BT: Tensor | None = None,
        plausibility_ratio: float = 0.5,
    ) -> Tensor:
        """Returns hidden_TBD after the final norm, time first.

        `routes_BTLK` replays experts (-1 routes live); `padding_BT` is True where a token must not
        count for load balancing.
        """
        self._set_replay(routes_BTLK, plausibility_ratio)
        try:
            hidden_TBD = self.trunk(tokens_BT, None, None, padding_mask=padding_BT)
            if self.trunk.config.sequence_parallel:
                hidden_TBD = gather_from_sequence_parallel_region(hidden_TBD)
            return hidden_TBD
        finally:
            self._set_replay(None, 0.0)

    def token_logprobs(
        self, tokens_BT: Tensor, routes_BTLK: Tensor | None = None, **options: Unpack[ScoreOptions]
    ) -> Tensor:
        """The log-probabilities alone."""
        scores = self.token_logprobs_and_entropy(
            tokens_BT, routes_BTLK, with_entropy=False, **options
        )
        return scores[0]

    def token_logprobs_and_entropy(
        self,
        tokens_BT: Tensor,
        routes_BTLK: Tensor | None = None,
        *,
        mask_BT: Tensor | None = None,
        padding_BT: Tensor | None = None,
        plausibility_ratio: float = 0.5,
        temperature_B: Tensor | None = None,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Returns (logprobs_BT, entropy_BT): index t holds log p(token t | tokens before t), 0 where
        masked out, and the position's entropy in nats (no gradient).

        `temperature_B` divides a row's logits; None: 1.
        """
        hidden_TBD = self.forward_hidden(
            tokens_BT, routes_BTLK, padding_BT=padding_BT, plausibility_ratio=plausibility_ratio
        )
        if temperature_B is not None and bool((temperature_B != 1).any()):
            # the logits are linear in the hidden state
            hidden_TBD = hidden_TBD / temperature_B[None, :, None]
        return self.score_hidden(hidden_TBD, tokens_BT, mask_BT, with_entropy=with_entropy)

    def score_hidden(
        self,
        hidden_TBD: Tensor,
        tokens_BT: Tensor,
        mask_BT: Tensor | None = None,
        *,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns (logprobs_BT, entropy_BT) of tokens whose hidden states are known. Zeros where
        nothing is asked.

        With `mask_BT` the output matrix, a fifth of a step's arithmetic, meets only the masked-in
        positions.
        """
        batch, num_tokens = tokens_BT.shape
        hidden_ND = hidden_TBD[:-1].reshape(-1, hidden_TBD.shape[-1])
        targets_N = tokens_BT.T[1:].reshape(-1)
        if mask_BT is None:
            logprobs_N, entropy_N = _score_tokens(hidden_ND, self.head_VD, targets_N, with_entropy)
        else:
            chosen_C = mask_BT.T[1:].reshape(-1).nonzero()[:, 0]
            logprobs_C, entropy_C = _score_tokens(
                hidden_ND.index_select(0, chosen_C),
                self.head_VD,
                targets_N.index_select(0, chosen_C),
                with_entropy,
            )
            zeros_N = hidden_ND.new_zeros(targets_N.shape)
            logprobs_N = zeros_N.index_put((chosen_C,), logprobs_C)
            entropy_N = zeros_N.index_put((chosen_C,), entropy_C)
        first_B1 = hidden_ND.new_zeros(batch, 1)
        shape = (num_tokens - 1, batch)
        return (
            torch.cat((first_B1, logprobs_N.view(shape).T), dim=1),
            torch.cat((first_B1, entropy_N.view(shape).T), dim=1),
        )

    def draft_states(self, hidden_TBD: Tensor, tokens_BT: Tensor) -> list[Tensor]:
        """Returns, per depth d, states_SBD of positions 0 .. T-2-d whose product with the head
        scores token t+2+d.
        """
        embeddings_TBD = self.embedding_VD[tokens_BT.T]
        states, state_SBD = [], hidden_TBD
        for depth, draft in enumerate(self.draft):
            state_SBD, normed_SBD = draft(state_SBD[:-1], embeddings_TBD[1 + depth :])
            states.append(normed_SBD)
        return states

    def _set_replay(self, routes_BTLK: Tensor | None, plausibility_ratio: float) -> None:
        """Hands each router its layer's routes, in the time-first order it sees tokens in."""
        routers = self.routers
        if routes_BTLK is not None and routes_BTLK.shape[2:] != (
            len(routers),
            self.spec.experts_per_token,
        ):
            raise ValueError(
                f"routes have [layers, experts] {tuple(routes_BTLK.shape[2:])}, "
                f"wanted {(len(routers), self.spec.experts_per_token)}"
            )
        for index, router in enumerate(routers):
            router.plausibility_ratio = plausibility_ratio
            router.replay_NK = None
            if routes_BTLK is not None:
                router.replay_NK = routes_BTLK[:, :, index].transpose(0, 1).flatten(0, 1).long()

    def expert_counts_LE(self) -> Tensor:
        """Returns how many tokens each expert took since the last `balance_experts`."""
        counts = [router.local_tokens_per_expert for router in self.routers]
        return torch.stack(counts) if counts else self.head_VD.new_zeros(0, 0)

    def balance_experts(self, counts_LE: Tensor, rate: float) -> None:
        """Moves each expert's bias, where there is one, by `rate` towards the mean load and forgets
        the counts.
        """
        for router, counts_E in zip(self.routers, counts_LE, strict=True):
            if self.spec.router_score == "sigmoid" and router.weight.requires_grad:
                router.expert_bias += rate * torch.sign(counts_E.mean() - counts_E)
            router.local_tokens_per_expert.zero_()

    def take_replay_counts(self) -> tuple[int, int]:
        """Returns how many routes were replayed and how many of them the plausibility filter
        replaced, and forgets both.
        """
        replayed = sum(router.num_replayed for router in self.routers)
        replaced = sum(router.num_replaced for router in self.routers)
        for router in self.routers:
            router.num_replayed = router.num_replaced = 0
        return replayed, replaced

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Live tensors by canonical name. Query, key and value are one, `qkv_proj`."""
        named: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding_VD}
        for index, layer in enumerate(self.layers):
            named |= layer_tensors(layer, f"model.layers.{index}", self.spec)
        final_norm: Any = self.trunk.decoder.final_layernorm
        named["model.norm.weight"] = final_norm.weight
        if not self.spec.tied_embeddings:
            named["lm_head.weight"] = self.head_VD
        for depth, draft in enumerate(self.draft):
            named |= {
                f"model.mtp.{depth}.{name}": weight for name, weight in draft.named_parameters()
            }
        return named

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """Returns clones of all weights, adapters merged: canonical names, contiguous, fp32, on the
        CPU. All ranks call it together and each gets the whole.
        """
        weights: dict[str, Tensor] = {}
        for name, tensor in self.canonical_tensors().items():
            whole = gather_whole(tensor.detach(), find_cut(tensor))
            whole = merge_update(self.adapters, name, whole)
            value = whole.to("cpu", torch.float32)
            if "qkv_proj" in name:
                for part, rows in zip("qkv", split_qkv(value, self.spec), strict=True):
                    weights[name.replace("qkv_proj", f"{part}_proj")] = rows.clone()
            else:
                weights[name] = value.clone(memory_format=torch.contiguous_format)
        return {name: weights[name] for name in self.spec.weight_shapes()}

    def moving_weights(self) -> dict[str, Tensor]:
        """What training moves: the adapters alone where there are any, else all weights."""
        if not self.adapters:
            return self.export_weights()
        return {
            name: value.to("cpu", copy=True) for name, value in self.adapters.state_dict().items()
        }

    def restore_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes back what `moving_weights` gave."""
        if self.adapters:
            self.adapters.load_state_dict(weights)
        else:
            self.import_weights(weights)

    @torch.no_grad()
    def import_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies canonical weights into the model. Names and shapes must match exactly. Adapters add
        nothing afterwards.
        """
        check_shapes(self.spec, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        for name, tensor in self.canonical_tensors().items():
            if "qkv_proj" in name:
                q, k, v = (weights[name.replace("qkv_proj", f"{part}_proj")] for part in "qkv")
                whole = join_qkv((q, k, v), self.spec)
            else:
                whole = weights[name]
            tensor.copy_(cut_mine(whole, find_cut(tensor)))
        for adapter in self.adapters.values():
            adapter.up_OR.zero_()  # type: ignore[operator]  # torch types modules' fields loosely


def build_trainer_model(
    spec: ModelSpec,
    world_size: int = 1,
    seed: int = 0,
    precision: PrecisionName = "fp32",
) -> TrainerModel:
    """Builds a model with fresh weights drawn from `seed`, on the process's device. Equal seeds give
    equal weights in every process on the same kind of device. `precision` is that of the experts'
    products; weights are fp32 in all.

    Opens single-process groups where none are open; for several processes call
    `open_process_groups` first.
    """
    open_process_groups(world_size=world_size)
    device = current_device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = TrainerModel(spec, precision)
    return model.train()
