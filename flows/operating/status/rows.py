"""Rows of `ostinato status`, names of its findings, and time thresholds."""

from enum import StrEnum

from pydantic import Field

from ostinato.infra.platform.record import Record


class Fault(StrEnum):
    """Finding about a part. docs/troubleshooting.md has the remedy for each."""

    SILENT_SERVER = "silent-server"
    DEAD_SERVICE = "dead-service"
    SILENT_WORKER = "silent-worker"
    LATE_RUN = "late-run"
    LEAKED_LEASE = "leaked-lease"
    LOST_RUN = "lost-run"
    STUCK_RUN = "stuck-run"
    SILENT_GATEWAY = "silent-gateway"
    SLOW_STORE = "slow-store"
    UNUSABLE_STORE = "unusable-store"
    FULL_DISK = "full-disk"
    HELD_LOCK = "held-lock"
    UNUSABLE_LEDGER = "unusable-ledger"
    WEDGED_UPLOAD = "wedged-upload"
    LOST_CHECKPOINT = "lost-checkpoint"
    FAILED_STAGE = "failed-stage"
    KILLED_STAGE = "killed-stage"
    STOPPED_PROCESS = "stopped-process"
    SILENT_STAGE = "silent-stage"
    STALLED_STAGE = "stalled-stage"
    DEAD_RANK = "dead-rank"
    DEAD_REPLICA = "dead-replica"
    STARVED_ENGINE = "starved-engine"
    STARVED_BOXES = "starved-boxes"
    FORGOTTEN_CYCLE = "forgotten-cycle"


class Thresholds(Record):
    """Times in seconds after which a state is a finding."""

    answer: float = Field(default=5.0, description="time limit for an answer of one part")
    slow: float = Field(default=2.0, description="answer of the object store that counts as slow")
    lock: float = Field(default=2.0, description="wait for the ledger's write lock")
    late: float = Field(default=60.0, description="delay of a due run")
    pending: float = Field(default=120.0, description="start-up time of a run's process")
    lease: float = Field(default=60.0, description="age of a slot that no run holds")
    heartbeat: float = Field(
        default=30.0, description="pause between heartbeats, which are due every five seconds"
    )
    progress: float = Field(
        default=120.0, description="time without progress and without computation"
    )
    status: float = Field(
        default=60.0, description="age of a `status.json` that is due every second"
    )
    starved: float = Field(default=180.0, description="time without a token, or without a box")
    upload: float = Field(
        default=60.0, description="time for which an unfinished weight version has not grown"
    )
    cycle: float = Field(default=600.0, description="idle time of an open cycle")


class StatusRow(Record):
    """State of one part."""

    part: str
    stage: str = Field(default="", description="stage that these boxes, engines or replica serve")
    state: str
    waits_for: str = ""
    since: float | None = Field(default=None, description="seconds since the epoch; None: unknown")
    fault: Fault | None = Field(default=None, description="None: nothing is wrong")
    cause: str = Field(default="", description="likely cause; empty when nothing is wrong")
    progress: str = ""
    done_ratio: float | None = Field(
        default=None, description="part done of a running stage (0..1)"
    )
    doing: str = Field(default="", description="a running stage and its progress in words")

    def changed(self, **values: object) -> "StatusRow":
        """The row with other values."""
        return self.model_copy(update=values)


def first_line(error: object) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
