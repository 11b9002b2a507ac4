"""What a replica may be, and which requests it may take.

Owns `ReplicaState`. It decides nothing by itself.
"""

from enum import StrEnum


class ReplicaState(StrEnum):
    """One replica's standing. Only SERVING takes requests."""

    STARTING = "starting"  # holds no verified weights yet
    SERVING = "serving"
    STALE = "stale"  # an update failed: refuses requests until a verified one is applied
    DEAD = "dead"  # its process is gone
