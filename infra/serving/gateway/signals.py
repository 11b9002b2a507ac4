"""Feedback signals, shared by the API that takes them and the stages that read them."""

from enum import StrEnum


class Signal(StrEnum):
    """Kind of feedback on an interaction. Its value, 0 to 1, is the share of its weight that counts; 0
    withdraws it.
    """

    EDIT_KEPT = "edit_kept"  # the edit was accepted
    EDIT_REVERTED = "edit_reverted"  # the edit was undone
    EDIT_SURVIVED = (
        "edit_survived"  # share of the edit's lines still there later; 0 is none of them
    )
    DISSATISFIED_FOLLOW_UP = (
        "dissatisfied_follow_up"  # the next message complains about this answer
    )
    ABANDONED = "abandoned"  # the user left before looking
    THUMBS_UP = "thumbs_up"
    THUMBS_DOWN = "thumbs_down"
    LATENCY_SECONDS = "latency_seconds"  # how long the user waited; only the gateway reports it


GATEWAY_SIGNALS = frozenset({Signal.LATENCY_SECONDS})
"""Signals a client may not send: the gateway measures them itself."""
OWN_FEEDBACK = "gateway/"
"""Prefix of the feedback ids that the gateway gives."""
_MEASURES = frozenset({Signal.EDIT_SURVIVED, Signal.LATENCY_SECONDS})


def is_said(signal: str, value: float) -> bool:
    """Whether an event of this value says anything. That of a user's deed says nothing where it is 0."""
    return value > 0 or signal in _MEASURES
