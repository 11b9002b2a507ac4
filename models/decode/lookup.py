"""Draft tokens copied from the context itself.

Owns `find_continuations`: where the last tokens of a context stood before, what followed them is
proposed again. Agents repeat lines of the files they read, names and calls; such a draft costs no
pass of any layer. Enters: the slot table. Leaves: token ids. Whether it pays is the gate's concern,
and whether a draft holds is the engine's: it is verified like any other.

Shapes: B decoding slots, k tokens proposed a slot.
"""

import functools
from collections.abc import Callable

import numpy as np

from models.decode.slots import SlotTable

MATCH_TOKENS = 2  # shorter matches hold too rarely to pay for their verification
_LONGEST_MATCH_TOKENS = 8  # of equally good places the last one is taken


def find_continuations(
    table: SlotTable, slots_B: np.ndarray, num_tokens: int, drafted: int = 0
) -> tuple[np.ndarray, int]:
    """(proposals [B, k], slots that have one) of what follows each context and the `drafted` tokens
    behind it. A slot without one repeats its last token.
    """
    last_B = table.tokens_SC[slots_B, table.context_S[slots_B] + drafted - 1]
    proposals_Bk = np.repeat(last_B[:, None], num_tokens, axis=1)
    find_place, found = _compile_search(), 0
    for index, slot in enumerate(slots_B.tolist()):
        length = int(table.context_S[slot]) + drafted
        place = find_place(table.tokens_SC[slot, :length], num_tokens)
        if place >= 0:
            proposals_Bk[index] = table.tokens_SC[slot, place : place + num_tokens]
            found += 1
    return proposals_Bk, found


@functools.cache
def _compile_search() -> Callable[[np.ndarray, int], int]:
    """Compiled at the first use: a search in numpy costs a tenth of a compiled decode step."""
    import numba  # noqa: PLC0415 - its loading is paid by who copies

    return numba.njit(cache=True, nogil=True)(_best_place)


def _best_place(tokens_T: np.ndarray, num_tokens: int) -> int:
    """Where the continuation of the longest earlier match of the last tokens begins; -1: nowhere.

    A place must have all its tokens in the context.
    """
    length = len(tokens_T)
    best, best_depth = -1, MATCH_TOKENS - 1
    for place in range(length - num_tokens, MATCH_TOKENS - 1, -1):
        depth = 0
        while (
            depth < min(place, _LONGEST_MATCH_TOKENS)
            and tokens_T[place - 1 - depth] == tokens_T[length - 1 - depth]
        ):
            depth += 1
        if depth > best_depth:
            best, best_depth = place, depth
    return best
