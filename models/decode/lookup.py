"""Draft tokens copied from the context itself.

Owns `find_continuations`: where the last tokens of a context stood before, what followed them is
proposed again. Agents repeat lines of the files they read, names and calls; such a draft costs no
pass of any layer. Enters: the slot table. Leaves: token ids. Whether it pays is the gate's concern,
and whether a draft holds is the engine's: it is verified like any other.

Shapes: B decoding slots, k tokens proposed a slot.
"""

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
    found = 0
    for index, slot in enumerate(slots_B.tolist()):
        length = int(table.context_S[slot]) + drafted
        place = _best_place(table.tokens_SC[slot, :length], num_tokens)
        if place is not None:
            proposals_Bk[index] = table.tokens_SC[slot, place : place + num_tokens]
            found += 1
    return proposals_Bk, found


def _best_place(tokens_T: np.ndarray, num_tokens: int) -> int | None:
    """Where the continuation of the longest earlier match of the last tokens begins."""
    length = len(tokens_T)
    last = length - num_tokens  # a place must have all its tokens in the context
    if last < MATCH_TOKENS or length < 2 * MATCH_TOKENS:
        return None
    is_match = tokens_T[1:last] == tokens_T[-1]
    is_match &= tokens_T[: last - 1] == tokens_T[-2]
    places = np.flatnonzero(is_match) + 2
    if not len(places):
        return None
    for depth in range(MATCH_TOKENS + 1, _LONGEST_MATCH_TOKENS + 1):
        longer = places[places >= depth]
        longer = longer[tokens_T[longer - depth] == tokens_T[-depth]]
        if not len(longer):
            break
        places = longer
    return int(places[-1])
