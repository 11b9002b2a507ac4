"""Content of a stage's `status.json`: what its parts wait for, and the state of engines and boxes.

A running stage replaces the file every second; `ostinato status` reads it.
"""

from typing import Any

from pydantic import Field

from ostinato.infra.platform.record import Record


class BlockedOn(Record):
    """Wait of one part of a stage."""

    what: str
    detail: str
    since: float = Field(description="seconds since the epoch, as all times here")


class ReplicaStatus(Record):
    """State of an engine replica, as its fleet knows it."""

    state: str
    since: float = Field(
        description="time at which the state was entered, in seconds since the epoch"
    )
    version: int | None = Field(default=None, description="weights that it serves; None: none")
    reason: str = Field(default="", description="why it does not serve")


class DecodingActivity(Record):
    """Work of all replicas together."""

    computed_tokens: float = Field(description="generated and prefilled tokens, running total")
    since: float = Field(
        description="time at which the total last grew, in seconds since the epoch"
    )
    attempts_in_flight: int


class BoxUse(Record):
    """Boxes of all rollout workers."""

    leased: int
    waiting: int = Field(description="attempts that wait for a box")
    waiting_since: float | None = None
    """start of the longest wait; None: no attempt waits"""


class StageStatus(Record):
    """State of a stage at one moment."""

    phase: str = Field(description="running: the file is replaced every second")
    at: float
    waits: dict[str, BlockedOn] = Field(
        default={}, description="waits by part: trainer, engines, orchestrator"
    )
    replicas: dict[str, ReplicaStatus] = Field(
        default={}, description="states of engine replicas by their names"
    )
    generation: DecodingActivity | None = None
    boxes: BoxUse | None = None
    numbers: dict[str, Any] = Field(default={}, description="counters for display")
