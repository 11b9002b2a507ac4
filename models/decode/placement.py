"""Choice of the slot for a new request: its session's, else one whose cache can begin with another's prefix."""

import numpy as np

from ostinato.models.decode.cache import SlotCache
from ostinato.models.decode.slots import SlotTable

# a request waits for a prefix of at least this length that another slot is about to feed
_WORTH_WAITING_TOKENS = 24


def find_place(
    slots: SlotTable,
    cache: SlotCache,
    session_id: str,
    prompt_T: np.ndarray,
    version: int,
    *,
    share_prefixes: bool,
) -> tuple[int, int] | None:
    """(slot, prompt tokens already cached there). None to wait for a prefix under way."""
    slot = slots.session_slot(session_id)
    reused = slots.shared_prefix(slot, prompt_T) if slot is not None else 0
    if reused == 0:
        donor = usable = 0
        if share_prefixes:
            donor, usable, promised = slots.find_donor(prompt_T, version)
            if promised - usable >= _WORTH_WAITING_TOKENS:
                return None
        slot = slot if slot is not None else slots.vacant_slot()
        assert slot is not None, "a slot is vacant while fewer requests run than there are slots"
        if usable > 0 and donor != slot:
            cache.copy_prefix(donor, slot, usable)
        reused = usable
        slots.oldest_version_S[slot] = version
        slots.reported_S[slot] = 0
    assert slot is not None
    return slot, min(reused, len(prompt_T) - 1)
