"""Feedback signals, shared by the API that takes them and the stages that read them."""

from enum import StrEnum


class Signal(StrEnum):
    """Kind of feedback on an interaction, with its range of values in brackets."""

    EDIT_KEPT = "edit_kept"  # the edit was accepted (1)
    EDIT_REVERTED = "edit_reverted"  # the edit was undone (1)
    EDIT_SURVIVED = "edit_survived"  # share of the edit's lines still there later (0..1)
    DISSATISFIED_FOLLOW_UP = (
        "dissatisfied_follow_up"  # the next message complains about this answer (1)
    )
    ABANDONED = "abandoned"  # the user left before looking (1)
    THUMBS_UP = "thumbs_up"  # (1)
    THUMBS_DOWN = "thumbs_down"  # (1)
    LATENCY_SECONDS = "latency_seconds"  # how long the user waited; only the gateway reports it


GATEWAY_SIGNALS = frozenset({Signal.LATENCY_SECONDS})
"""Signals a client may not send: the gateway measures them itself."""
OWN_FEEDBACK = "gateway/"
"""Prefix of the feedback ids that the gateway gives."""
