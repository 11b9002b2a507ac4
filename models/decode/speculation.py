"""Speculative decoding: draft tokens from the draft (multi-token prediction) layers, from the
context itself, or from the context behind those of the draft layers.

Verification is the engine's: one pass over the drafts samples every position exactly as plain
decoding would, with the noise of (seed, position), and keeps drafts that equal the sample. So
speculation changes no token of any request, greedy or not: it is rejection sampling with a
point-mass proposal. A draft layer sees the same noise, which makes it pick the same token more
often than an independent draw.

Shapes: S slots, B drafting slots, F slots of the pass before, m draft tokens plus one, V vocabulary,
D model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.decode.config import EngineConfig
from ostinato.models.decode.forward import Trunk, add_product, linear
from ostinato.models.decode.gate import SpeculationGate
from ostinato.models.decode.lookup import Lookup
from ostinato.models.decode.sampling import NoiseSource
from ostinato.models.decode.slots import SlotTable
from ostinato.models.decode.step_costs import StepCosts
from ostinato.models.decode.weights import DecodeWeights

if TYPE_CHECKING:
    from ostinato.models.decode.native_trunk import NativeTrunk

_MISSES = 4  # steps in a row for which the lookup has nothing, after which it rests
_LONGEST_REST_STEPS = 64
_LEARNED_AT_REST = 8  # then one answer in so many is learned

__all__ = ["Drafted", "SpeculationGate", "Speculator", "draft_logits"]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one step verifies."""

    choice: int  # of the gate
    width: int = 1  # rows a slot: its last token and the drafts
    layered: int = 0  # drafts that draft layers made; they come first
    noise_BmV: np.ndarray | None = None  # of all rows, where drafting needed it already


_MIN_GAIN_RATIO = 1.05  # draft layers must promise so much more than the lookup
_TRIAL_STEPS = 8  # steps in which draft layers are tried
_STEPS_BETWEEN_TRIALS = 2048
_PLAIN = Drafted(0)


class _Trials:
    """When draft layers are tried beside a lookup: in some steps at first, then now and again."""

    def __init__(self) -> None:
        self.promised_rate = 0.0  # tokens a slot in the time of a plain step; 0: not known
        self._left, self._pause_steps = _TRIAL_STEPS, _STEPS_BETWEEN_TRIALS

    def is_due(self) -> bool:
        """Whether to try now; to be asked once a step in which the lookup has nothing."""
        if self._left:
            self._left -= 1
            return True
        self._pause_steps -= 1
        if not self._pause_steps:
            self._left, self._pause_steps = _TRIAL_STEPS, _STEPS_BETWEEN_TRIALS
        return False


class Speculator:
    """Draft tokens for many slots at once."""

    def __init__(
        self,
        trunk: Trunk,
        native: "NativeTrunk | None",
        depth: int,
        config: EngineConfig,
        noise: NoiseSource,
    ) -> None:
        has_lookup = config.lookup_tokens > 0
        self.gate = SpeculationGate(depth, config.speculation_max_batch, has_lookup=has_lookup)
        self._trunk, self._native = trunk, native
        self._noise = noise
        self._lookup_tokens = config.lookup_tokens
        if has_lookup:
            self.lookup = Lookup(config.lookup_entries)
        self._misses, self._rest_steps, self._next_rest_steps = 0, 0, _MISSES
        self._answers = 0
        self._costs: dict[tuple[int, int], StepCosts] = {}  # by batch size and draft layers
        self._trials: dict[tuple[int, int], _Trials] = {}
        self._fed: tuple[np.ndarray, Tensor, np.ndarray] | None = None

    def remember(self, slots_B: np.ndarray, hidden_RD: Tensor, gained_B: np.ndarray) -> None:
        """Takes the hidden states of a pass, the same number of rows a slot; draft layers begin with
        that of a slot's last token gained. Read, if ever, before the next pass.
        """
        self._fed = (slots_B, hidden_RD, gained_B)

    def reset(self) -> None:
        """Forgets what was measured."""
        self.gate.reset()
        self._costs.clear()
        self._trials.clear()

    def learn(self, tokens_T: np.ndarray, start: int) -> None:
        """Takes a finished answer: its tokens from `start` on may be guessed again. While nothing is
        found, one answer in some is enough to notice when that changes.
        """
        self._answers += 1
        is_resting = self._rest_steps > 0 or self._next_rest_steps == _LONGEST_REST_STEPS
        if self._lookup_tokens and (not is_resting or self._answers % _LEARNED_AT_REST == 0):
            self.lookup.learn(tokens_T, start)

    def record(self, batch: int, drafted: Drafted, seconds: float, tokens: int) -> None:
        """Adds one decode-only step."""
        self.gate.record(batch, drafted.choice, seconds, tokens)
        if self._lookup_tokens and batch <= self.gate.max_batch:
            copied = drafted.width - 1 - drafted.layered
            self._costs_of(batch, drafted.layered).record(copied, seconds / batch)
            if drafted.layered:
                key = ((batch - 1).bit_length(), drafted.layered)
                self._trials[key].promised_rate = self._layered_rate(batch, drafted.layered)

    def propose(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray
    ) -> Drafted | None:
        """Writes draft tokens behind each context as the gate chooses; verified ones become part of
        it. None: a plain step that nobody need measure.
        """
        if self._rest_steps:
            self._rest_steps -= 1
            return None
        batch = len(slots_B)
        choice = self.gate.choose(batch)
        if not choice:
            self._rest_steps = self.gate.idle_steps(batch)
            return _PLAIN
        layers = choice
        if self._lookup_tokens:
            costs_w = self._costs_of(batch, 0).relative_w
            copied, rate = self.lookup.propose(table, slots_B, costs_w)
            layers = self._worthy_layers(batch, copied, rate)
            self._count_miss(is_miss=not copied and not layers)
            if not layers:
                return Drafted(choice, 1 + copied)
        noise_BmV = None
        if self._native is not None:
            self._draft_native(self._native, weights, table, slots_B, layers)
        else:
            noise_BmV = step_noise(self._noise, table, slots_B, layers + 1)
            self._draft_layers(weights, table, slots_B, noise_BmV)
        copied = 0
        if self._lookup_tokens:
            costs_w = self._costs_of(batch, layers).relative_w
            held = float(np.prod(self.gate.acceptance()[:layers]))
            copied, _ = self.lookup.propose(table, slots_B, costs_w, layers, held)
        if copied:
            noise_BmV = None  # of fewer rows than there are now
        return Drafted(choice, 1 + layers + copied, layers, noise_BmV)

    def _worthy_layers(self, batch: int, copied: int, rate: float) -> int:
        """The draft layers that promise most tokens in the time of a plain step, if that is more
        than `rate`, what the lookup promises; 0: none. Where the lookup has nothing, layers are
        tried from time to time.
        """
        best, best_rate = 0, _MIN_GAIN_RATIO * rate
        for layers in range(1, self.gate.max_depth + 1):
            key = ((batch - 1).bit_length(), layers)
            if key not in self._trials:
                self._trials[key] = _Trials()
            trials = self._trials[key]
            if not copied and trials.is_due():
                return layers
            if trials.promised_rate > best_rate:
                best, best_rate = layers, trials.promised_rate
        return best

    def _count_miss(self, *, is_miss: bool) -> None:
        """Where the lookup keeps finding nothing it is asked ever less: it costs some percent of a
        compiled step.
        """
        if not is_miss:
            self._misses, self._next_rest_steps = 0, _MISSES
            return
        self._misses += 1
        if self._misses == _MISSES:
            self._misses, self._rest_steps = 0, self._next_rest_steps
            self._next_rest_steps = min(2 * self._next_rest_steps, _LONGEST_REST_STEPS)

    def _costs_of(self, batch: int, layers: int) -> StepCosts:
        key = ((batch - 1).bit_length(), layers)
        if key not in self._costs:
            self._costs[key] = StepCosts(self._lookup_tokens)
        return self._costs[key]

    def _layered_rate(self, batch: int, layers: int) -> float:
        """Tokens that a slot gains by draft layers in the time of a plain step; 0 when not known."""
        plain = self._costs_of(batch, 0).plain_seconds
        layered = self._costs_of(batch, layers).plain_seconds
        if not layered:
            return 0.0
        return (1 + float(np.cumprod(self.gate.acceptance()[:layers]).sum())) * plain / layered

    def _last_hidden(self, slots_B: np.ndarray) -> np.ndarray:
        """Hidden states [B, D]: every slot that decodes was sampled in the pass before."""
        assert self._fed is not None, "slots decode after the pass that completed their prompt"
        fed_slots_F, hidden_RD, gained_F = self._fed
        order_F = fed_slots_F.argsort()
        index_B = order_F[np.searchsorted(fed_slots_F, slots_B, sorter=order_F)]
        width = len(hidden_RD) // len(fed_slots_F)
        return hidden_RD.numpy()[index_B * width + gained_F[index_B] - 1]

    def _draft_layers(
        self, weights: DecodeWeights, table: SlotTable, slots_B: np.ndarray, noise_BmV: np.ndarray
    ) -> None:
        hidden_BD = torch.from_numpy(self._last_hidden(slots_B))
        at_B = table.context_S[slots_B]
        tokens_B = table.tokens_SC[slots_B, at_B - 1]
        temperature_B = table.temperature_S[slots_B]
        is_greedy_B = temperature_B == 0
        divisor_B1 = torch.from_numpy(np.where(is_greedy_B, np.float32(1), temperature_B))[:, None]
        for depth in range(noise_BmV.shape[1] - 1):
            logits_BV, hidden_BD = draft_logits(
                self._trunk, weights, depth, hidden_BD, torch.from_numpy(tokens_B)
            )
            weights_BV = torch.softmax(logits_BV / divisor_B1, dim=-1).numpy()
            raced_BV = weights_BV / noise_BmV[:, depth]
            raced_BV[is_greedy_B] = weights_BV[is_greedy_B]
            tokens_B = raced_BV.argmax(axis=-1)
            table.tokens_SC[slots_B, at_B + depth] = tokens_B

    def _draft_native(
        self,
        native: "NativeTrunk",
        weights: DecodeWeights,
        table: SlotTable,
        slots_B: np.ndarray,
        depths: int,
    ) -> None:
        hidden_BD = self._last_hidden(slots_B)
        at_B = table.context_S[slots_B]
        tokens_B = table.tokens_SC[slots_B, at_B - 1]
        seed_keys_B, temperature_B = table.seed_keys_S[slots_B], table.temperature_S[slots_B]
        for depth in range(depths):
            native.draft(weights, depth, hidden_BD, tokens_B)
            tokens_B = native.sample(seed_keys_B, at_B + depth, temperature_B)[0]
            table.tokens_SC[slots_B, at_B + depth] = tokens_B


def step_noise(noise: NoiseSource, table: SlotTable, slots_B: np.ndarray, width: int) -> np.ndarray:
    """Noise [B, m, V] of the places behind each context."""
    positions_Bm = table.context_S[slots_B][:, None] + np.arange(width)
    seed_keys_R = np.repeat(table.seed_keys_S[slots_B], width)
    noise_RV = noise.exponential(seed_keys_R, positions_Bm.reshape(-1))
    return noise_RV.reshape(*positions_Bm.shape, -1)


def draft_logits(
    trunk: Trunk, weights: DecodeWeights, depth: int, hidden_BD: Tensor, tokens_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One draft layer: logits [B, V] of the token after `tokens_B`, and the hidden state for the
    next depth.
    """
    layer = weights.drafts[depth]
    embedded_BD = weights.embedding_VD.index_select(0, tokens_B).float()
    mixed_BD = linear(trunk.normalize(hidden_BD), layer.hidden_in_DD)
    mixed_BD = add_product(mixed_BD, trunk.normalize(embedded_BD), layer.embed_in_DD.t())
    gate, up = linear(trunk.normalize(mixed_BD), layer.gate_up_MD).chunk(2, dim=-1)
    mixed_BD = add_product(mixed_BD, F.silu(gate).mul_(up), layer.down_MD)
    normal_BD = trunk.normalize(mixed_BD).mul_(layer.norm_D)
    return linear(normal_BD, weights.embedding_VD), mixed_BD
