"""Trainable Megatron model of a shape, and conversion between its weights and canonical ones.

Shapes: B batch, T tokens, V vocabulary, D model width, L layers, K experts per token, E experts, N
= T*B (time first).
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypedDict, Unpack

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional

from ostinato.kernels.moe.precision import PrecisionName
from ostinato.models.device import current_device
from ostinato.models.network.adapters import merge_update
from ostinato.models.network.attention.prefixes import PrefixTree, rotating_nodes
from ostinato.models.network.canonical import head_rows, join_qkv, layer_tensors, split_qkv
from ostinato.models.network.head import local_targets, score_rows, score_tokens
from ostinato.models.network.mixed import is_mixed, mixed_context
from ostinato.models.network.norm import RootMeanSquareNorm
from ostinato.models.network.parallel.context import local_rows, row_rotary
from ostinato.models.network.parallel.shards import find_cuts, gather_whole, local_shard, mark_heads
from ostinato.models.network.parallel.stages import ChunkGPT, build_chunks, gather_stages
from ostinato.models.network.routing import RankRouters, replaying
from ostinato.models.network.transformer_engine import EngineRecipe
from ostinato.models.network.trunk import block_modules, megatron_config
from ostinato.models.process_groups import open_process_groups
from ostinato.models.spec import ModelSpec
from ostinato.models.weight_shapes import check_shapes, weight_shapes


class DraftLayer(torch.nn.Module):
    """One depth of multi-token prediction: a projection of state and embedding, then one SwiGLU with a
    residual.

    It has no attention and no cache, so a draft costs a few small products. Depth 0 reads the
    trunk's hidden state after the final norm and the embedding of token t+1, and predicts token t+2.
    Depth d reads the state of depth d-1 and the embedding of token t+1+d, and predicts token t+2+d.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner, epsilon = spec.hidden_size, spec.mtp_hidden_size, spec.norm_epsilon
        self.hidden_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.embed_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.in_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.mlp_norm = RootMeanSquareNorm(hidden, eps=epsilon)
        self.gate_up_proj = torch.nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, hidden, bias=False)
        self.norm = RootMeanSquareNorm(hidden, eps=epsilon)

    def forward(self, hidden_ND: Tensor, embedding_ND: Tensor) -> tuple[Tensor, Tensor]:
        """State for the next depth, and the state that the shared embedding turns into logits."""
        joined = torch.cat((self.hidden_norm(hidden_ND), self.embed_norm(embedding_ND)), dim=-1)
        state_ND = self.in_proj(joined).to(hidden_ND.dtype)
        gate_NM, up_NM = self.gate_up_proj(self.mlp_norm(state_ND)).chunk(2, dim=-1)
        state_ND = state_ND + self.down_proj(functional.silu(gate_NM) * up_NM)
        return state_ND, self.norm(state_ND)


class RowOptions(TypedDict, total=False):
    """Options of `TrainerModel.run_chunk` for rows."""

    padding_BT: Tensor | None
    plausibility_ratio: float
    tree: PrefixTree | None


class TrainerModel(torch.nn.Module):
    """Trunk and draft layers, with canonical weight names and batch-first token ids."""

    def __init__(
        self,
        spec: ModelSpec,
        precision: PrecisionName = "fp32",
        engine: EngineRecipe | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.is_mixed = is_mixed(precision, engine)
        self.chunks = build_chunks(
            megatron_config(spec, precision, engine, is_whole=is_whole),
            block_modules(spec, engine),
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_sequence_tokens,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            # latent heads have their own
            position_embedding_type="none" if spec.latent else "rope",
            rotary_percent=spec.rotary_fraction,
        )
        self.set_rope_scaling(spec.rope_scaling_factor)
        depth = spec.mtp_depth if self.last_chunk.post_process else 0
        self.draft = torch.nn.ModuleList(DraftLayer(spec) for _ in range(depth))
        self.adapters = torch.nn.ModuleDict()  # empty: all weights are trained
        for name, tensor in self.canonical_tensors().items():
            mark_heads(tensor, head_rows(name, spec))

    def set_rope_scaling(self, factor: float) -> None:
        """Divides positions by `factor` from now on, and updates the spec."""
        if self.spec.latent is not None:
            if factor != 1:
                raise ValueError(
                    f"rope_scaling_factor={factor}, wanted 1 with latent attention, whose context "
                    "YaRN stretches (latent.yarn)"
                )
            return
        self.spec = self.spec.model_copy(update={"rope_scaling_factor": factor})
        # a new module, since Megatron caches angles by the module's identity
        rotary = row_rotary(self.spec)
        for chunk in self.chunks:
            chunk.rotary_pos_emb = rotary

    @property
    def trunk(self) -> ChunkGPT:
        """The rank's first chunk. Without a pipeline, the whole trunk."""
        return self.chunks[0]  # type: ignore[return-value]

    @property
    def last_chunk(self) -> ChunkGPT:
        """The rank's last chunk."""
        return self.chunks[-1]  # type: ignore[return-value]

    @property
    def embedding_VD(self) -> Tensor:
        """The embedding. Only the first stage has it."""
        return self.trunk.embedding.word_embeddings.weight

    @property
    def head_VD(self) -> Tensor:
        """The output matrix, which may be the embedding. Only the last stage has it."""
        if self.spec.tied_embeddings and self.last_chunk.pre_process:
            return self.embedding_VD
        head: Any = self.last_chunk.output_layer.weight
        return head

    @property
    def layers(self) -> list[Any]:
        """The rank's layers, which Megatron types as plain modules."""
        chunks: list[Any] = list(self.chunks)
        return [layer for chunk in chunks for layer in chunk.decoder.layers]

    @property
    def routers(self) -> RankRouters:
        """The routers of the rank's layers."""
        dense = self.spec.num_dense_layers
        return RankRouters([one.mlp.router for one in self.layers if one.layer_number > dense])

    def forward_hidden(
        self,
        tokens_BT: Tensor,
        routes_BTLK: Tensor | None = None,
        **options: Unpack[RowOptions],
    ) -> Tensor:
        """Returns hidden_TBD after the final norm of this rank's part of the rows. See `run_chunk`."""
        return self.run_chunk(self.trunk, tokens_BT, routes_BTLK, **options)

    def run_chunk(
        self,
        chunk: ChunkGPT,
        tokens_BT: Tensor,
        routes_BTLK: Tensor | None = None,
        *,
        padding_BT: Tensor | None = None,
        plausibility_ratio: float = 0.5,
        tree: PrefixTree | None = None,
    ) -> Tensor:
        """Returns the hidden states after a chunk, time first. Under sequence parallelism they are
        this rank's part, but whole after the last chunk. A chunk that is not the first reads its
        input states from `chunk.decoder.input_tensor`.

        `routes_BTLK` replays experts (-1 routes live). `padding_BT` is True for tokens that must
        not count for load balancing. With a tree, chunks pass on the states of its nodes, and the
        last chunk returns those of the rows.
        """
        if tree is not None:
            tokens_BT, padding_BT, routes_BTLK = tree.pick(tokens_BT, routes_BTLK)
        elif padding_BT is not None:
            padding_BT = local_rows(padding_BT, 1)
        is_cut = chunk.config.sequence_parallel
        if padding_BT is not None and is_cut and not chunk.pre_process:  # Megatron does the first's
            padding_BT = scatter_to_sequence_parallel_region(padding_BT.T.contiguous()).T
        with (
            replaying(chunk, routes_BTLK, plausibility_ratio),
            rotating_nodes(chunk, tree),
            mixed_context(self.is_mixed),
        ):
            # the tree is passed as the attention mask, which Megatron hands to attention unread
            hidden_TBD = chunk(local_rows(tokens_BT, 1), None, tree, padding_mask=padding_BT)
        hidden_TBD = hidden_TBD.to(torch.promote_types(hidden_TBD.dtype, torch.float32))
        if is_cut and chunk.post_process:
            hidden_TBD = gather_from_sequence_parallel_region(hidden_TBD)
        return hidden_TBD if tree is None or not chunk.post_process else tree.spread(hidden_TBD)

    def token_logprobs(
        self,
        tokens_BT: Tensor,
        routes_BTLK: Tensor | None = None,
        *,
        mask_BT: Tensor | None = None,
        temperature_B: Tensor | None = None,
        **options: Unpack[RowOptions],
    ) -> Tensor:
        """logprobs_BT: index t holds log p(token t | tokens before t), 0 where masked out."""
        hidden_TBD = self.forward_hidden(tokens_BT, routes_BTLK, **options)
        return self.score_hidden(hidden_TBD, tokens_BT, mask_BT, temperature_B=temperature_B)[0]

    def score_hidden(
        self,
        hidden_TBD: Tensor,
        tokens_BT: Tensor,
        mask_BT: Tensor | None = None,
        *,
        temperature_B: Tensor | None = None,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns (logprobs_BT, entropy_BT) from hidden states. Entropies are in nats and have no
        gradient; they are zeros unless `with_entropy`. `temperature_B` divides a row's logits;
        None: 1.

        Only positions with `mask_BT` are multiplied by the output matrix, a fifth of a step's
        arithmetic; others are zeros.
        """
        if temperature_B is not None and bool((temperature_B != 1).any()):
            # the logits are linear in the hidden state
            hidden_TBD = hidden_TBD / temperature_B[None, :, None]
        with mixed_context(self.is_mixed):
            return score_rows(hidden_TBD, self.head_VD, tokens_BT, mask_BT, with_entropy)

    def target_logprobs(self, hidden_TBD: Tensor, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Log-probabilities of masked-in tokens (of whole rows) that this rank's states predict."""
        targets_N, chosen_C = local_targets(tokens_BT, mask_BT)
        hidden_CD = hidden_TBD.reshape(-1, hidden_TBD.shape[-1]).index_select(0, chosen_C)
        targets_C = targets_N.index_select(0, chosen_C)
        with mixed_context(self.is_mixed):
            return score_tokens(hidden_CD, self.head_VD, targets_C, with_entropy=False)[0]

    def draft_states(self, hidden_TBD: Tensor, embeddings_TBD: Tensor) -> list[Tensor]:
        """Returns, per depth d, states_SBD of positions 0 .. T-2-d whose product with the head
        scores token t+2+d. `embeddings_TBD` are those of the row's tokens.
        """
        states, state_SBD = [], hidden_TBD
        with mixed_context(self.is_mixed):
            for depth, draft in enumerate(self.draft):
                state_SBD, normed_SBD = draft(state_SBD[:-1], embeddings_TBD[1 + depth :])
                states.append(normed_SBD)
        return states

    def canonical_tensors(self) -> dict[str, Tensor]:
        """The rank's live tensors by canonical name, with query, key and value as one `qkv_proj`."""
        named: dict[str, Tensor] = {}
        if self.trunk.pre_process:
            named["model.embed_tokens.weight"] = self.embedding_VD
        for layer in self.layers:  # Megatron counts from 1
            named |= layer_tensors(layer, f"model.layers.{layer.layer_number - 1}", self.spec)
        if self.last_chunk.post_process:
            final_norm: Any = self.last_chunk.decoder.final_layernorm
            named["model.norm.weight"] = final_norm.weight
            head = "model.embed_tokens" if self.spec.tied_embeddings else "lm_head"
            named[f"{head}.weight"] = self.head_VD
        for depth, draft in enumerate(self.draft):
            named |= {
                f"model.mtp.{depth}.{name}": weight for name, weight in draft.named_parameters()
            }
        return named

    @torch.no_grad()
    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights in the order of the spec, one whole tensor at a time: fp32, on the
        device, with adapters merged. All ranks must iterate together.
        """
        places = {name: place for place, name in enumerate(weight_shapes(self.spec))}
        mine = {
            name: functools.partial(_whole_tensor, self.adapters, name, tensor)
            for name, tensor in self.canonical_tensors().items()
        }
        in_order = gather_stages(mine, lambda name: places[name.replace("qkv_proj", "q_proj")])
        for name, whole in in_order:
            if "qkv_proj" in name:
                for part, rows in zip("qkv", split_qkv(whole.float(), self.spec), strict=True):
                    yield name.replace("qkv_proj", f"{part}_proj"), rows
            else:
                yield name, whole.float()

    def export_weights(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Contiguous fp32 clones on the CPU of the weights in `names` (None: all). All ranks call
        it together, each with its own names, and hold no more than those and one whole tensor.
        """
        return {
            name: whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, whole in self.whole_tensors()
            if names is None or name in names
        }

    def moving_tensors(self) -> dict[str, Tensor]:
        """Live tensors that training changes: those of the adapters if there are any, else all."""
        if not self.adapters:
            return self.canonical_tensors()
        return {f"adapters.{name}": value for name, value in self.adapters.named_parameters()}

    def import_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies canonical weights into the model and resets its adapters. Names and shapes must match."""
        check_shapes(self.spec, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        self.read_weights(weights.__getitem__)

    @torch.no_grad()
    def read_weights(self, read: Callable[[str], Tensor]) -> None:
        """Like `import_weights`, with `read` called once per name, in one order on all ranks."""
        for name, tensor in self.canonical_tensors().items():
            if "qkv_proj" in name:
                q, k, v = (read(name.replace("qkv_proj", f"{part}_proj")) for part in "qkv")
                whole = join_qkv((q, k, v), self.spec)
            else:
                whole = read(name)
            tensor.copy_(local_shard(whole, find_cuts(tensor)))
        for adapter in self.adapters.values():
            adapter.up_OR.zero_()  # type: ignore[operator]  # torch types modules' fields loosely


def _whole_tensor(adapters: torch.nn.ModuleDict, name: str, tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks, with its adapter merged."""
    return merge_update(adapters, name, gather_whole(tensor.detach(), find_cuts(tensor)))


def recompute_layers(model: TrainerModel, is_recomputed: bool) -> None:
    """Makes layers keep only their input for the backward pass and recompute the rest (False: keep
    all activations).
    """
    for layer in model.layers:
        layer.is_recomputed = is_recomputed


@torch.no_grad()
def copy_weights(source: TrainerModel, target: TrainerModel) -> None:
    """Copies the weights of a model, with adapters merged, into one of the same layout."""
    weights = source.canonical_tensors()
    for name, tensor in target.canonical_tensors().items():
        tensor.copy_(merge_update(source.adapters, name, weights[name]))


def build_trainer_model(
    spec: ModelSpec,
    world_size: int = 1,
    seed: int = 0,
    precision: PrecisionName = "fp32",
    engine: EngineRecipe | None = None,
    *,
    is_fresh: bool = True,
) -> TrainerModel:
    """Builds a model on the process's device with fresh fp32 weights drawn from `seed`. Equal seeds
    give equal weights in every process on the same kind of device. `precision` applies to the
    experts' products; unless it is fp32, a GPU computes all other products in bf16. `engine` is
    Transformer Engine's recipe for those others. Without `is_fresh` the caller imports them.

    Opens single-process groups if none are open; several processes call `open_process_groups`
    before.
    """
    open_process_groups(world_size=world_size)
    device = current_device()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = TrainerModel(spec, precision, engine)
        if is_fresh and device.type != "meta":
            _draw_whole(model, seed, precision, engine)
    return model.train()


@torch.no_grad()
def _draw_whole(
    model: TrainerModel, seed: int, precision: PrecisionName, engine: EngineRecipe | None
) -> None:
    """Gives a pipeline stage its weights of the whole model of `seed`. Stages drawn separately
    would have other weights, so the whole model is drawn.
    """
    if model.trunk.config.pipeline_model_parallel_size > 1:
        torch.manual_seed(seed)
        whole = TrainerModel(model.spec, precision, engine, is_whole=True)
        drawn = whole.canonical_tensors()
        for name, tensor in model.canonical_tensors().items():
            tensor.copy_(drawn[name])
