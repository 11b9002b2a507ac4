"""One whole step of decoding in fixed shapes: drafts, forward pass, samples, packed results.

Every shape follows from the bucket, every tensor is on one device and no value is read by the host,
so a CUDA graph can hold the step; the tests check all three. The formulae are those of `Trunk`,
`draft_logits` and `sample_rows`; only the order of roundings differs.

Slices are `narrow`, `select` and `unsqueeze`: Python's brackets ask for a CUDA driver even where the
tensors are fake, and then nothing could be proven without one.

A row of padding is computed like any other, attends at least one key, writes to the scratch slot
and is read by nobody. Rows never meet but in attention, where they only read.

Shapes: A segments, W rows a segment, N rows, R sampled rows, T keys, C positions, G key/value
heads, R query heads a group, H query heads, d head width, D model width, E experts, K experts a
token, V vocabulary, Q draft tokens a segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.decode.forward import Trunk, add_product, linear
from ostinato.models.decode.speculation import draft_logits
from ostinato.models.decode.static_cache import StaticCache
from ostinato.models.decode.static_layout import Bucket, StepInputs, split_inputs
from ostinato.models.decode.static_sampling import DeviceNoise, draw_rows
from ostinato.models.decode.weights import DecodeWeights, LayerWeights
from ostinato.models.spec import ModelSpec


class StaticTrunk:
    """The step and the memory that it alone uses."""

    def __init__(
        self, spec: ModelSpec, cache: StaticCache, device: str, *, is_grouped: bool, drafts: bool
    ) -> None:
        self._spec, self._cache = spec, cache
        self._trunk = Trunk(spec, cache.positions, device)
        self._noise = DeviceNoise(spec.vocab_size, device)
        self._is_grouped = is_grouped
        self._experts_E = torch.arange(spec.num_experts, device=device)
        rows = cache.scratch_slot + 1
        # The trunk's last hidden state of each slot, from which the next step drafts.
        self._hidden_PD = torch.zeros(rows, spec.hidden_size, device=device) if drafts else None

    def run(
        self, bucket: Bucket, weights: DecodeWeights, input_words: Tensor, output_words: Tensor
    ) -> None:
        """One step; `output_words` are overwritten."""
        inputs = split_inputs(bucket, input_words)
        steps_W = torch.arange(bucket.width, device=input_words.device)
        positions_AW = inputs.first_A.unsqueeze(1) + steps_W
        is_real_AW = steps_W < inputs.lengths_A.unsqueeze(1)
        tokens_AW = inputs.tokens_AW
        if bucket.drafted:
            tokens_AW = self._draft(bucket, weights, inputs)
        hidden_ND, routes_NLK = self._forward(
            bucket, weights, inputs, tokens_AW, positions_AW, is_real_AW
        )
        last_A = (inputs.lengths_A - 1).clamp(min=0)
        firsts_A = torch.arange(bucket.segments, device=last_A.device) * bucket.width
        hidden_RD = hidden_ND
        if not bucket.samples_every_row:
            hidden_RD = hidden_ND.index_select(0, firsts_A + last_A)
        logits_RV = linear(hidden_RD, weights.embedding_VD)
        drawn_R, logprobs_R = self._draw(bucket, inputs, logits_RV)
        if self._hidden_PD is not None:
            kept_A = last_A
            if bucket.samples_every_row:  # behind the last draft that held
                drafts_AQ = tokens_AW.narrow(1, 1, bucket.width - 1)
                held_AQ = drafts_AQ == drawn_R.view(bucket.segments, -1).narrow(
                    1, 0, bucket.width - 1
                )
                kept_A = held_AQ.long().cumprod(dim=1).sum(dim=1)
            slots_A = torch.where(inputs.lengths_A > 0, inputs.slots_A, self._cache.scratch_slot)
            kept_AD = hidden_ND.index_select(0, firsts_A + kept_A)
            self._hidden_PD.index_copy_(0, slots_A, kept_AD)
        drafts_AQ = tokens_AW.narrow(1, bucket.width - bucket.drafted, bucket.drafted)
        parts = (drawn_R.int(), logprobs_R.view(torch.int32), drafts_AQ.int(), routes_NLK.int())
        torch.cat([part.flatten() for part in parts], out=output_words)  # as split_outputs reads

    def _forward(
        self,
        bucket: Bucket,
        weights: DecodeWeights,
        inputs: StepInputs,
        tokens_AW: Tensor,
        positions_AW: Tensor,
        is_real_AW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, D] after the final norm, and routes [N, L, K]."""
        trunk, cache = self._trunk, self._cache
        positions_AW = positions_AW.clamp(max=cache.positions - 1)  # of padding
        slots_AW = torch.where(is_real_AW, inputs.slots_A.unsqueeze(1), cache.scratch_slot)
        places_N = (slots_AW * cache.positions + positions_AW).flatten()
        rotation_N1d = trunk.rotation_C1d.index_select(0, positions_AW.flatten())
        mask_A1BT = self._mask(bucket, positions_AW)
        hidden_ND = weights.embedding_VD.index_select(0, tokens_AW.flatten()).float()
        heads, groups = self._spec.num_attention_heads, self._spec.num_query_groups
        routes = []
        for index, layer in enumerate(weights.layers):
            qk_NHd, values_NGd = trunk.project_heads(layer, hidden_ND, rotation_N1d)
            query_NHd, keys_NGd = qk_NHd.split([heads, groups], dim=1)
            cache.write_layer(index, places_N, keys_NGd, values_NGd)
            memory = cache.read_layer(
                index, inputs.slots_A, bucket.context, is_in_place=bucket.is_in_place
            )
            attended_NO = self._attend(bucket, query_NHd, memory, mask_A1BT)
            hidden_ND = add_product(hidden_ND, attended_NO, layer.output_OD)
            normal_ND = trunk.normalize(hidden_ND)
            experts_NK, shares_NK = trunk.route(layer, normal_ND)
            routes.append(experts_NK)
            hidden_ND = hidden_ND + self._mix_experts(layer, normal_ND, experts_NK, shares_NK)
        hidden_ND = trunk.normalize(hidden_ND).mul_(weights.final_norm_D)
        return hidden_ND, torch.stack(routes, dim=1)

    def _mask(self, bucket: Bucket, positions_AW: Tensor) -> Tensor:
        """Additive mask [A, 1, R*W, T]: each row sees its own position and those before it."""
        per_group = self._spec.num_attention_heads // self._spec.num_query_groups
        keys_T = torch.arange(bucket.context, device=positions_AW.device)
        is_hidden_AWT = keys_T > positions_AW.unsqueeze(2)
        mask_AWT = torch.zeros_like(is_hidden_AWT, dtype=self._cache.keys_LPCGd.dtype)
        mask_AWT = mask_AWT.masked_fill(is_hidden_AWT, -torch.inf)
        shape = (bucket.segments, per_group, bucket.width, bucket.context)
        return mask_AWT.unsqueeze(1).expand(shape).reshape(shape[0], 1, -1, shape[3])

    def _attend(
        self, bucket: Bucket, query_NHd: Tensor, memory: tuple[Tensor, Tensor], mask_A1BT: Tensor
    ) -> Tensor:
        """Attention of all rows to their own slots; returns [N, H*d]. Query heads of a group are
        rows beside one another, so that keys are read once a group.
        """
        spec, keys_AGTd = self._spec, memory[0]
        groups, width = spec.num_query_groups, spec.head_dim
        per_group = spec.num_attention_heads // groups
        query = query_NHd.reshape(bucket.segments, bucket.width, groups, per_group, width)
        query = query.permute(0, 2, 3, 1, 4).reshape(bucket.segments, groups, -1, width)
        mixed = F.scaled_dot_product_attention(
            query.to(keys_AGTd.dtype), *memory, attn_mask=mask_A1BT, scale=1.0
        )
        mixed = mixed.view(bucket.segments, groups, per_group, bucket.width, width)
        return mixed.permute(0, 3, 1, 2, 4).reshape(bucket.rows, -1).float()

    def _mix_experts(
        self, layer: LayerWeights, normal_ND: Tensor, experts_NK: Tensor, shares_NK: Tensor
    ) -> Tensor:
        """Weighted sum [N, D] of the chosen experts' outputs, in slot order: no atomics."""
        rows, per_token = experts_NK.shape
        dtype = layer.expert_up_EDF.dtype
        rounded_ND = normal_ND.to(dtype)
        if self._is_grouped:
            sorted_S, order_S = experts_NK.flatten().sort(stable=True)
            ends_E = torch.searchsorted(sorted_S, self._experts_E, right=True, out_int32=True)
            tokens_S = torch.div(order_S, per_token, rounding_mode="floor")
            own_SD = rounded_ND.index_select(0, tokens_S)
            gate, up = F.grouped_mm(own_SD, layer.expert_up_EDF, offs=ends_E).float().chunk(2, -1)
            inner_SF = F.silu(gate).mul_(up).to(dtype)
            outer_SD = F.grouped_mm(inner_SF, layer.expert_down_EFD, offs=ends_E)
            outer_SD = torch.empty_like(outer_SD).index_copy_(0, order_S, outer_SD)
        else:
            gate, up = torch.matmul(rounded_ND, layer.expert_up_EDF).float().chunk(2, -1)
            inner_ENF = F.silu(gate).mul_(up).to(dtype)
            outer_END = torch.bmm(inner_ENF, layer.expert_down_EFD)
            places_NK = experts_NK * rows + torch.arange(rows, device=experts_NK.device).unsqueeze(
                1
            )
            outer_SD = outer_END.flatten(0, 1).index_select(0, places_NK.flatten())
        outer_NKD = outer_SD.float().view(rows, per_token, -1)
        return (outer_NKD * shares_NK.unsqueeze(2)).sum(dim=1)

    def _draft(self, bucket: Bucket, weights: DecodeWeights, inputs: StepInputs) -> Tensor:
        """Tokens [A, W]: the last known one and what the draft layers make of it."""
        assert self._hidden_PD is not None
        hidden_AD = self._hidden_PD.index_select(0, inputs.slots_A)
        tokens = [inputs.tokens_AW.select(1, 0)]
        temperature_A = inputs.temperature_A.float()
        for depth in range(bucket.drafted):
            logits_AV, hidden_AD = draft_logits(self._trunk, weights, depth, hidden_AD, tokens[-1])
            noise_AV = self._noise.exponential(inputs.seed_keys_A, inputs.first_A + 1 + depth)
            tokens.append(draw_rows(logits_AV, noise_AV, temperature_A, None)[0])
        return torch.stack(tokens, dim=1)

    def _draw(self, bucket: Bucket, inputs: StepInputs, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Draws the token after each sampled row by the noise of its place."""
        width = bucket.width if bucket.samples_every_row else 1

        def spread(rules_A: Tensor) -> Tensor:
            return rules_A.unsqueeze(1).expand(-1, width).flatten()

        if bucket.samples_every_row:
            steps_W = torch.arange(1, width + 1, device=logits_RV.device)
            positions_R = (inputs.first_A.unsqueeze(1) + steps_W).flatten()
        else:
            positions_R = inputs.first_A + inputs.lengths_A
        noise_RV = self._noise.exponential(spread(inputs.seed_keys_A), positions_R)
        limits = None
        if bucket.is_limited:
            limits = (spread(inputs.top_k_A), spread(inputs.top_p_A.float()))
        return draw_rows(logits_RV, noise_RV, spread(inputs.temperature_A.float()), limits)
