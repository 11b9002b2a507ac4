"""States of a replica, and the report of a weight swap. `health` has the transitions."""

from dataclasses import dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    """One replica's standing. Only SERVING takes requests."""

    STARTING = "starting"  # holds no verified weights yet
    SERVING = "serving"  # healthy
    SUSPECT = "suspect"  # did not answer in time: gets nothing new, keeps what it has
    STALE = "stale"  # an update failed: refuses requests until a verified one is applied
    DEAD = "dead"  # its process is gone, or was silent for too long
    RESTARTING = "restarting"  # a new process stands in its place, without verified weights


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One weight swap."""

    version: int
    prepare_seconds: float  # checking and fusing, beside decoding
    pause_seconds: float  # between two steps
