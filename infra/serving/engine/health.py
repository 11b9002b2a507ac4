"""A replica's health as a pure state machine.

`TRANSITIONS` and `observe`: which event leads from which state to which. No clock, no I/O, no Ray, so
every transition is tested by itself. After a process was lost or replaced, only a verified weight
apply of the new process leads back to SERVING.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class ReplicaState(StrEnum):
    """State of one replica. Only a SERVING one takes requests."""

    STARTING = "starting"  # holds no verified weights yet
    SERVING = "serving"  # healthy
    SUSPECT = "suspect"  # did not answer in time: gets no new requests, keeps its own
    STALE = "stale"  # an update failed: refuses requests until a verified one is applied
    DEAD = "dead"  # its process is gone, or was silent for too long
    RESTARTING = "restarting"  # a new process took its place, without verified weights


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One weight swap."""

    version: int
    prepare_seconds: float  # checking and fusing, while decoding goes on
    pause_seconds: float  # of decoding, between two steps


class HealthEvent(StrEnum):
    """Observation of a replica."""

    STARTED = "started"  # a process without verified weights answered
    VERIFIED = "verified"  # it applied a version and every checksum held
    REFUSED = "refused"  # an update failed, or the replica reports that it does not serve
    ANSWERED = "answered"  # a sign of life, nothing more
    SILENT = "silent"  # it did not answer in time
    LOST = "lost"  # its process is gone


_S, _E = ReplicaState, HealthEvent
_USUAL = {
    _E.LOST: _S.DEAD,
    _E.STARTED: _S.RESTARTING,
    _E.VERIFIED: _S.SERVING,
    _E.REFUSED: _S.STALE,
}
TRANSITIONS: dict[ReplicaState, dict[HealthEvent, ReplicaState]] = {
    _S.STARTING: _USUAL
    | {_E.STARTED: _S.STARTING, _E.ANSWERED: _S.STARTING, _E.SILENT: _S.STARTING},
    _S.SERVING: _USUAL | {_E.ANSWERED: _S.SERVING, _E.SILENT: _S.SUSPECT},
    _S.SUSPECT: _USUAL | {_E.ANSWERED: _S.SERVING, _E.SILENT: _S.SUSPECT},
    _S.STALE: _USUAL | {_E.ANSWERED: _S.STALE, _E.SILENT: _S.STALE},
    _S.DEAD: _USUAL
    | {
        _E.VERIFIED: _S.DEAD,  # a late answer of the process that died
        _E.REFUSED: _S.DEAD,
        _E.ANSWERED: _S.RESTARTING,  # a process lives there; its version is not known
        _E.SILENT: _S.DEAD,
    },
    _S.RESTARTING: _USUAL | {_E.ANSWERED: _S.RESTARTING, _E.SILENT: _S.RESTARTING},
}

SILENCES_TO_DEATH = 3


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """One replica as its fleet knows it."""

    state: ReplicaState = ReplicaState.STARTING
    process_id: int | None = None  # of the process that answered last; None: none yet
    version: int | None = None  # verified version it serves; None: none
    silences: int = 0  # in a row
    since: float = 0.0  # when the state was entered
    reason: str = ""


def observe(
    health: ReplicaHealth,
    event: HealthEvent,
    *,
    at: float,
    process_id: int | None = None,
    version: int | None = None,
    reason: str = "",
) -> ReplicaHealth:
    """The health after an event. If the event is of a new process, the event STARTED comes first."""
    if process_id is not None and health.process_id not in (None, process_id):
        started = replace(health, process_id=process_id)
        health = _move(started, HealthEvent.STARTED, at, f"process {process_id} took its place")
    if event is HealthEvent.VERIFIED and version is None:
        raise ValueError("the event VERIFIED came without its version, wanted one")
    silences = health.silences + 1 if event is HealthEvent.SILENT else 0
    moved = _move(health, event, at, reason)
    if silences >= SILENCES_TO_DEATH:
        moved = _move(moved, HealthEvent.LOST, at, f"silent {silences} times in a row")
    serves = moved.state in (ReplicaState.SERVING, ReplicaState.SUSPECT)
    held = version if event is HealthEvent.VERIFIED else moved.version
    return replace(
        moved,
        silences=0 if moved.state is ReplicaState.DEAD else silences,
        process_id=moved.process_id if process_id is None else process_id,
        version=held if serves else None,
    )


def observe_report(
    health: ReplicaHealth,
    reported: ReplicaState,
    *,
    at: float,
    process_id: int,
    version: int,
    reason: str = "",
) -> ReplicaHealth:
    """The health after a replica's report. A replica reports SERVING only after every checksum held."""
    health = observe(health, HealthEvent.ANSWERED, at=at, process_id=process_id, reason=reason)
    if reported is ReplicaState.SERVING:
        event = HealthEvent.VERIFIED
    elif reported is ReplicaState.STALE:
        event = HealthEvent.REFUSED
    else:
        event = HealthEvent.STARTED
    verified = version if event is HealthEvent.VERIFIED else None
    return observe(health, event, at=at, process_id=process_id, version=verified, reason=reason)


def _move(health: ReplicaHealth, event: HealthEvent, at: float, reason: str) -> ReplicaHealth:
    state = TRANSITIONS[health.state][event]
    if state is health.state:
        return replace(health, reason=reason or health.reason)
    return replace(health, state=state, since=at, reason=reason)
