"""Draft tokens copied from the context itself.

Owns `find_continuations`: where the last tokens of a context stood before, what followed them is
proposed again. Agents repeat lines of the files they read, names and calls; such a draft costs no
pass of any layer. Enters: the slot table. Leaves: token ids. Whether it pays is the gate's concern,
and whether a draft holds is the engine's: it is verified like any other. The search is compiled: in
numpy it cost a tenth of a compiled decode step.

Shapes: B decoding slots, k tokens proposed a slot.
"""

import numba
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
    proposals_Bk = np.empty((len(slots_B), num_tokens), dtype=np.int64)
    ends_B = table.context_S[slots_B] + drafted
    return proposals_Bk, int(_fill(table.tokens_SC, slots_B, ends_B, proposals_Bk))


@numba.njit(cache=True)
def _fill(
    tokens_SC: np.ndarray, slots_B: np.ndarray, ends_B: np.ndarray, proposals_Bk: np.ndarray
) -> int:
    """Writes the proposals; returns how many slots have one."""
    found, num_tokens = 0, proposals_Bk.shape[1]
    for index in range(len(slots_B)):
        tokens_T = tokens_SC[slots_B[index], : ends_B[index]]
        place = _best_place(tokens_T, num_tokens)
        if place < 0:
            proposals_Bk[index] = tokens_T[-1]
        else:
            proposals_Bk[index] = tokens_T[place : place + num_tokens]
            found += 1
    return found


@numba.njit(cache=True)
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
