"""Token batches of fixed shape, from documents on disk to tensors.

There are two kinds of source: rows cut from the concatenation of documents (Megatron indexed data),
and transcripts padded to a few lengths. `PhaseData` blends them.

Shapes: B rows, T tokens, N draws, S sources, R rows of a phase. Shapes recur (T is a row length or
one of the bucket lengths, B*T the microbatch), because each new shape costs a compilation in oneDNN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from ostinato.models.device import current_device
from ostinato.models.network.attention.prefixes import PrefixTree
from ostinato.models.training.config import DEMONSTRATIONS, TRANSCRIPT_ROW_MULTIPLE, PhaseConfig

# each is doubled repeatedly, up to the longest row
SHORTEST_BUCKETS = (2 * TRANSCRIPT_ROW_MULTIPLE, 3 * TRANSCRIPT_ROW_MULTIPLE)
PAD_TOKEN = 0
ROWS_PER_BATCH = 8  # of held-out shards


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch, built in the CPU's memory. Index 0 of a row is never a target. With routes,
    tokens use these experts if they are plausible. With a tree, shared prefixes are computed once.
    """

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    padding_BT: Tensor
    routes_BTLK: Tensor | None = None
    plausibility_ratio: float = 0.0
    tree: PrefixTree | None = None

    @property
    def computed_shape(self) -> tuple[int, int]:
        """Rows and tokens that all operations except attention compute."""
        if self.tree is not None:
            return 1, self.tree.num_nodes
        rows, tokens = self.tokens_BT.shape
        return rows, tokens

    def to(self, device: torch.device) -> "TokenBatch":
        """The batch on a device."""
        return TokenBatch(
            self.tokens_BT.to(device),
            self.loss_mask_BT.to(device),
            self.padding_BT.to(device),
            None if self.routes_BTLK is None else self.routes_BTLK.to(device),
            self.plausibility_ratio,
            None if self.tree is None else self.tree.to(device),
        )


class RowSource:
    """Rows of one length from a shard's documents, shuffled in every epoch and concatenated.

    Documents contain their own end-of-text token. An epoch's incomplete last row is left out.
    """

    def __init__(self, path_prefix: Path, row_tokens: int, seed: int) -> None:
        if not IndexedDataset.exists(str(path_prefix)):
            raise ValueError(f"no indexed data at {path_prefix}.bin and .idx, wanted both")
        self.documents = IndexedDataset(str(path_prefix))
        self.lengths: NDArray[np.int64] = np.asarray(
            self.documents.sequence_lengths, dtype=np.int64
        )
        self.row_tokens = row_tokens
        self.seed = seed
        self.rows_per_epoch = int(self.lengths.sum()) // row_tokens
        if self.rows_per_epoch == 0:
            raise ValueError(
                f"{path_prefix} holds {int(self.lengths.sum())} tokens, "
                f"wanted at least {row_tokens}"
            )
        self._epoch_layout = lru_cache(maxsize=2)(self._lay_out_epoch)

    def _lay_out_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """An epoch's order of the documents, and the offset in tokens at which each begins."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        return order, np.concatenate(([0], np.cumsum(self.lengths[order])))

    def row(self, index: int) -> NDArray[np.int64]:
        """Returns row `index` of the endless sequence of epochs."""
        epoch, place = divmod(index, self.rows_per_epoch)
        order, starts = self._epoch_layout(epoch)
        first, last = place * self.row_tokens, (place + 1) * self.row_tokens
        pieces = []
        document = int(np.searchsorted(starts, first, side="right")) - 1
        while first < last:
            offset = first - int(starts[document])
            length = min(last, int(starts[document + 1])) - first
            if length:
                pieces.append(self.documents.get(int(order[document]), offset, length))
            first, document = first + length, document + 1
        return np.concatenate(pieces).astype(np.int64)


class TranscriptSource:
    """Microbatches of whole transcripts with a loss mask, every transcript once per epoch.

    Transcripts longer than a microbatch are left out and counted in `num_too_long`.
    """

    def __init__(
        self,
        path: Path,
        microbatch_tokens: int,
        seed: int,
        bucket_tokens: Sequence[int] | None = None,
    ) -> None:
        if not path.exists():
            raise ValueError(
                f"no transcripts at {path}, "
                f"wanted a safetensors file with token_ids, loss_mask, offsets"
            )
        arrays = load_file(path)
        self.token_ids, self.loss_mask, self.offsets = (
            arrays["token_ids"],
            arrays["loss_mask"],
            arrays["offsets"],
        )
        self.microbatch_tokens = microbatch_tokens
        self.seed = seed
        self.bucket_tokens = np.array(bucket_tokens or transcript_buckets(microbatch_tokens))
        bucket_of = np.searchsorted(self.bucket_tokens, np.diff(self.offsets))
        self.fitting = np.nonzero(bucket_of < len(self.bucket_tokens))[0]
        self.num_too_long = len(bucket_of) - len(self.fitting)
        if len(self.fitting) == 0:
            raise ValueError(
                f"{path} holds no transcript of at most {self.bucket_tokens.max()} tokens"
            )
        self.bucket_of = bucket_of
        # The cuts depend only on the number of transcripts per bucket, so all epochs share them.
        self.cuts = self._cut(np.sort(bucket_of[self.fitting])[::-1])
        self._epoch_layout = lru_cache(maxsize=2)(self._lay_out_epoch)

    def _cut(self, buckets: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Cuts transcripts, longest bucket first, into microbatches (first, last, length).
        Transcripts of the next bucket fill a microbatch up.
        """
        cuts, first = [], 0
        while first < len(buckets):
            length = int(self.bucket_tokens[buckets[first]])
            last = min(first + self.microbatch_tokens // length, len(buckets))
            cuts.append((first, last, length))
            first = last
        return cuts

    def _lay_out_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """An epoch's transcripts, longest bucket first, and the order of its microbatches."""
        generator = np.random.default_rng((self.seed, epoch))
        shuffled = generator.permutation(self.fitting)
        by_bucket = shuffled[np.argsort(-self.bucket_of[shuffled], kind="stable")]
        return by_bucket, generator.permutation(len(self.cuts))

    def microbatch(self, index: int) -> TokenBatch:
        """Returns microbatch `index` of the endless sequence of epochs."""
        epoch, place = divmod(index, len(self.cuts))
        transcripts, order = self._epoch_layout(epoch)
        first, last, length = self.cuts[order[place]]
        tokens_BT = np.full((self.microbatch_tokens // length, length), PAD_TOKEN, dtype=np.int64)
        loss_mask_BT = np.zeros(tokens_BT.shape, dtype=bool)
        padding_BT = np.ones(tokens_BT.shape, dtype=bool)
        for row, transcript in enumerate(transcripts[first:last]):
            start, stop = self.offsets[transcript], self.offsets[transcript + 1]
            tokens_BT[row, : stop - start] = self.token_ids[start:stop]
            loss_mask_BT[row, : stop - start] = self.loss_mask[start:stop]
            padding_BT[row, : stop - start] = False
        loss_mask_BT[:, 0] = False
        return TokenBatch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(loss_mask_BT),
            torch.from_numpy(padding_BT),
        )


def transcript_buckets(longest: int) -> list[int]:
    """Row lengths of transcripts, ascending, up to the longest."""
    lengths = {
        bucket << doublings
        for bucket in SHORTEST_BUCKETS
        for doublings in range(longest.bit_length())
        if bucket << doublings < longest
    }
    return sorted({*lengths, longest})


def stack_rows(rows: Sequence[NDArray[np.int64]]) -> TokenBatch:
    """Makes a batch of full rows. Every token except the first of a row is a target."""
    tokens_BT = np.stack(rows)
    loss_mask_BT = np.ones(tokens_BT.shape, dtype=bool)
    loss_mask_BT[:, 0] = False
    return TokenBatch(
        torch.from_numpy(tokens_BT),
        torch.from_numpy(loss_mask_BT),
        torch.from_numpy(np.zeros(tokens_BT.shape, dtype=bool)),
    )


def held_out_batches(
    corpus_directory: Path, name: str, row_tokens: int, tokens: int
) -> Iterator[TokenBatch]:
    """This rank's part of the first `tokens` of a held-out shard, on its device, in rows of
    `row_tokens`. Rows without loss make the number of batches equal on all ranks, since experts
    wait for all ranks.
    """
    source = RowSource(corpus_directory / "shards" / f"{name}_heldout", row_tokens, seed=0)
    num_rows = min(source.rows_per_epoch, max(1, tokens // row_tokens))
    ranks = parallel_state.get_data_parallel_world_size()
    mine = range(parallel_state.get_data_parallel_rank(), -(-num_rows // ranks) * ranks, ranks)
    for first in range(0, len(mine), ROWS_PER_BATCH):
        rows = mine[first : first + ROWS_PER_BATCH]
        batch = stack_rows([source.row(row) for row in rows])
        batch.loss_mask_BT.numpy()[np.array(rows) >= num_rows] = False
        yield batch.to(current_device())


def held_out_sources(corpus_directory: Path) -> list[str]:
    """Returns the names of all held-out shards of a corpus."""
    suffix = "_heldout.idx"
    return sorted(
        path.name.removesuffix(suffix) for path in (corpus_directory / "shards").glob(f"*{suffix}")
    )


def draw_sources(shares_NS: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns, for each of N draws, the source that is furthest behind its summed shares."""
    deficit_S = np.zeros(shares_NS.shape[1])
    drawn_N = np.empty(len(shares_NS), dtype=np.int64)
    for index, shares_S in enumerate(shares_NS):
        deficit_S += shares_S / shares_S.sum()
        drawn_N[index] = int(np.argmax(deficit_S))
        deficit_S[drawn_N[index]] -= 1
    return drawn_N


def count_before(drawn_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how often each draw's source was drawn before it."""
    before_N = np.zeros_like(drawn_N)
    for source in np.unique(drawn_N):
        places = np.nonzero(drawn_N == source)[0]
        before_N[places] = np.arange(len(places))
    return before_N


class PhaseData:
    """The microbatches of one phase. Sources are drawn by largest deficit, not at random: after any
    prefix of the phase each source is within one row (transcripts: one microbatch) of its share.
    """

    def __init__(self, phase: PhaseConfig, corpus_directory: Path, seed: int) -> None:
        self.phase = phase
        num_microbatches = phase.num_steps * phase.microbatches_per_step
        self.rows_per_microbatch = phase.microbatch_tokens // phase.sequence_tokens
        names = [name for name in phase.blend if name != DEMONSTRATIONS]
        shards = corpus_directory / "shards"
        self.rows = [
            RowSource(shards / f"{name}_train", phase.sequence_tokens, seed) for name in names
        ]
        self.transcripts = None
        progress_N = np.linspace(0.0, 1.0, num_microbatches)
        kind_shares_N2 = np.zeros((num_microbatches, 2))
        if DEMONSTRATIONS in phase.blend:
            path = corpus_directory / f"{DEMONSTRATIONS}.safetensors"
            self.transcripts = TranscriptSource(path, phase.microbatch_tokens, seed)
            kind_shares_N2[:, 1] = self._shares(DEMONSTRATIONS, progress_N)
        row_shares_NS = np.stack(
            [self._shares(name, progress_N) for name in names] or [progress_N * 0], axis=1
        )
        kind_shares_N2[:, 0] = row_shares_NS.sum(axis=1)
        self.kind_N = draw_sources(kind_shares_N2)
        self.place_N = count_before(self.kind_N)
        self.row_source_R = draw_sources(
            np.repeat(row_shares_NS[self.kind_N == 0], self.rows_per_microbatch, axis=0)
        )
        self.row_place_R = count_before(self.row_source_R)

    def _shares(self, name: str, progress_N: NDArray[np.float64]) -> NDArray[np.float64]:
        start, end = self.phase.blend[name]
        return start + (end - start) * progress_N

    def microbatch(self, index: int) -> TokenBatch:
        """Returns microbatch `index` of the phase."""
        place = int(self.place_N[index])
        if self.kind_N[index] == 1 and self.transcripts is not None:
            return self.transcripts.microbatch(place)
        rows = range(place * self.rows_per_microbatch, (place + 1) * self.rows_per_microbatch)
        return stack_rows(
            [self.rows[self.row_source_R[row]].row(int(self.row_place_R[row])) for row in rows]
        )
