"""One forward pass as data: which rows, of which slots, at which positions.

Decode rows come first: every decoding slot contributes the same number of rows (one, or one plus
its draft tokens); then each prefill span contributes its own number. Linear layers see all rows
packed; only attention tells them apart. It holds no weights and runs nothing.

Shapes: N rows, B decoding slots, m rows a decoding slot, A slots attended (a range or a gather), T
longest context among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.models.decode.cache import SlotCache

MASKED = -1e30  # finite: a row that is masked everywhere must not become NaN
# attending idle slots of a range costs less than gathering up to here (measured)
_RANGE_WASTE_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive positions of one slot."""

    slot: int
    start: int  # first position fed
    end: int  # one past the last position fed
    first_row: int  # row of `start` in the pass


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Attention plan of the decode rows."""

    width: int  # rows per slot (m)
    slots: int  # decoding slots (B)
    context: int  # T: keys looked at
    first_slot: int  # the range is first_slot .. first_slot + attended, unless gathered
    attended: int
    gather_A: Tensor | None  # slot indices to gather, None when a range is read in place
    # place of each decoding slot in the range, None when it is filled completely
    row_of_slot_B: Tensor | None
    mask_AmT: Tensor | None  # additive; None: all slots are as long, each row sees up to itself


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything a forward pass needs beside weights and cache."""

    tokens_N: Tensor
    positions_N: Tensor
    slots: np.ndarray  # slot of each row
    positions: np.ndarray  # position of each row
    write_indices: tuple[Tensor, Tensor] | None  # None: the rows are one slot's, in order
    decode: DecodePlan | None
    spans: tuple[PrefillSpan, ...]


def place_rows(
    decode_slots_B: np.ndarray, cached_B: np.ndarray, width: int, spans: Sequence[PrefillSpan]
) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of each row. `cached_B` is the position of each decoding slot's first."""
    slots, positions = decode_slots_B, cached_B
    if width > 1:
        slots = np.repeat(decode_slots_B, width)
        positions = (cached_B[:, None] + np.arange(width)).reshape(-1)
    if spans:
        slots = np.concatenate(
            [slots, *(np.full(span.end - span.start, span.slot) for span in spans)]
        )
        positions = np.concatenate(
            [positions, *(np.arange(span.start, span.end) for span in spans)]
        )
    return slots, positions


def plan_batch(
    cache: SlotCache,
    tokens_SC: np.ndarray,
    decode_slots_B: np.ndarray,
    cached_B: np.ndarray,
    width: int,
    spans: Sequence[PrefillSpan],
) -> BatchPlan:
    """Builds the plan. `cached_B` is the position of each decoding slot's first row."""
    slots, positions = place_rows(decode_slots_B, cached_B, width, spans)
    is_one_run = len(decode_slots_B) + len(spans) == 1
    return BatchPlan(
        tokens_N=torch.from_numpy(tokens_SC[slots, positions]),
        positions_N=torch.from_numpy(positions),
        slots=slots,
        positions=positions,
        write_indices=None if is_one_run else cache.write_indices(slots, positions),
        decode=_plan_decode(decode_slots_B, cached_B, width) if len(decode_slots_B) else None,
        spans=tuple(spans),
    )


def _plan_decode(slots_B: np.ndarray, cached_B: np.ndarray, width: int) -> DecodePlan:
    """Chooses between reading a range of slots in place and gathering the decoding ones."""
    count = len(slots_B)
    first, last = int(slots_B[0]), int(slots_B[-1])
    extent = last - first + 1
    cached = cached_B.tolist()  # Python's extremes of a few numbers: numpy's cost 2 us each
    shortest, longest = min(cached), max(cached)
    context = longest + width
    use_range = extent <= _RANGE_WASTE_RATIO * count
    is_full = extent == count
    attended = extent if use_range else count
    places_B = slots_B - first
    mask = None
    if shortest < longest:
        lengths_A = cached_B
        if use_range and not is_full:
            # of idle slots, which nobody reads
            lengths_A = np.full(extent, longest, dtype=np.int64)
            lengths_A[places_B] = cached_B
        last_visible = lengths_A[:, None] + np.arange(width)
        hidden = np.arange(context) > last_visible[:, :, None]
        mask = torch.from_numpy(np.where(hidden, np.float32(MASKED), np.float32(0)))
    return DecodePlan(
        width=width,
        slots=count,
        context=context,
        first_slot=first,
        attended=attended,
        gather_A=None if use_range else torch.from_numpy(slots_B),
        row_of_slot_B=torch.from_numpy(places_B) if use_range and not is_full else None,
        mask_AmT=mask,
    )
