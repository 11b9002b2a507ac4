"""Feedback signals, shared by the API that takes them and the stages that read them."""

from enum import StrEnum


class Signal(StrEnum):
    """Kind of feedback on an interaction. Its value, 0 to 1, scales its weight; 0 withdraws it."""

    EDIT_KEPT = "edit_kept"  # the edit was accepted
    EDIT_REVERTED = "edit_reverted"  # the edit was undone
    EDIT_SURVIVED = "edit_survived"  # share of the edit's lines that are still there later
    DISSATISFIED_FOLLOW_UP = (
        "dissatisfied_follow_up"  # the next message complains about this answer
    )
    ABANDONED = "abandoned"  # the user left before looking
    THUMBS_UP = "thumbs_up"
    THUMBS_DOWN = "thumbs_down"
    # only the gateway reports these
    LATENCY_SECONDS = "latency_seconds"  # how long the user waited
    GENERATED_TOKENS = "generated_tokens"  # tokens of the answer, or of all turns of an agent


GATEWAY_SIGNALS = frozenset({Signal.LATENCY_SECONDS, Signal.GENERATED_TOKENS})
"""Signals that clients may not send: the gateway measures them."""
OWN_FEEDBACK = "gateway/"
"""Prefix of the gateway's own feedback ids."""
_MEASURES = GATEWAY_SIGNALS | {Signal.EDIT_SURVIVED}


def is_informative(signal: str, value: float) -> bool:
    """Whether an event carries information. With the value 0 only measurements do."""
    return value > 0 or signal in _MEASURES
