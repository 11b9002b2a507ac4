"""Loss on concatenated source with a rolling window, in bits per byte: tokenizers compare.

Shapes: B windows of a batch, T tokens of a window.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ostinato.models.device import on_device
from ostinato.models.network.build import TrainerModel
from ostinato.tasks.evaluation.base_models.config import CodebaseLoss

_BATCH = 4


def rolling_windows(num_tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(first token, first scored token, end) of each window. Every token but the first is scored once,
    after at least half a window where there is as much.
    """
    stop = 0
    while stop < num_tokens:
        start = max(0, stop - window // 2)
        scored = max(stop, 1)
        stop = min(start + window, num_tokens)
        yield start, scored, stop


@torch.no_grad()
def measure_codebase(
    model: TrainerModel,
    token_ids: Sequence[int],
    source_bytes: int,
    window: int,
    on_window: Callable[[int], None],
) -> CodebaseLoss:
    """Summed loss of all tokens over the bytes that they stand for. `on_window` is told tokens done."""
    tokens_N = np.asarray(token_ids, dtype=np.int64)
    windows = list(rolling_windows(len(token_ids), window))
    nats = 0.0
    for first in range(0, len(windows), _BATCH):
        batch = windows[first : first + _BATCH]
        longest = max(stop - start for start, _, stop in batch)
        tokens_BT = np.zeros((len(batch), longest), dtype=np.int64)
        mask_BT = np.zeros((len(batch), longest), dtype=bool)
        for row, (start, scored, stop) in enumerate(batch):
            tokens_BT[row, : stop - start] = tokens_N[start:stop]
            mask_BT[row, scored - start : stop - start] = True
        logprobs_BT = model.token_logprobs(on_device(tokens_BT), mask_BT=on_device(mask_BT))
        nats -= float(logprobs_BT.sum(dtype=torch.float64))
        on_window(batch[-1][2])
    return CodebaseLoss(
        bits_per_byte=nats / math.log(2) / source_bytes,
        source_bytes=source_bytes,
        tokens=len(token_ids),
    )
