"""Assignment of rows to microbatches.

Sources are drawn by largest deficit, not at random: after any prefix of the phase each source is
within one row (transcripts: one microbatch) of its share.

Shapes: N draws, S sources, R rows.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ostinato.models.training.batch import RowSource, TokenBatch, TranscriptSource, stack_rows
from ostinato.models.training.config import DEMONSTRATIONS, PhaseConfig


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
    """The microbatches of one phase."""

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
