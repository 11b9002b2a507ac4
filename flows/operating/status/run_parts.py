"""Rows of a running RL stage's replicas, engines and boxes, from its `status.json`."""

from collections.abc import Iterator

from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds
from ostinato.infra.platform.cluster.stage_status import Generation, ReplicaStanding, StageStatus

# states of infra/serving/engine/health.py, which loads without torch and its package does not
_SERVING, _BEGINNING = "serving", ("starting", "restarting")


def part_rows(
    stage: str, status: StageStatus, now: float, thresholds: Thresholds
) -> Iterator[StatusRow]:
    """Replicas, then what all engines generate, then boxes."""
    for name, standing in sorted(status.replicas.items()):
        yield _replica_row(f"{stage} replica {name.rpartition('.')[2]}", standing)
    if status.generation is not None and status.replicas:
        yield _engines_row(f"{stage} engines", status.generation, now, thresholds)
    if status.boxes is not None:
        boxes = status.boxes
        row = StatusRow(part=f"{stage} boxes", state="up", progress=f"{boxes.leased} in use")
        since = boxes.waiting_since
        if since is not None:
            waits = {"waits_for": f"boxes, {boxes.waiting} attempts", "since": since}
            row = row.model_copy(update=waits)
            if now - since > thresholds.starved:
                cause = (
                    f"{boxes.waiting} attempts wait for a box, the longest for {now - since:.0f} s: "
                    "boxes start slowly or are not given back"
                )
                starved = {"state": "starved", "fault": Fault.STARVED_BOXES, "cause": cause}
                row = row.model_copy(update=starved)
        yield row


def _replica_row(part: str, standing: ReplicaStanding) -> StatusRow:
    version = "" if standing.version is None else f"version {standing.version}"
    row = StatusRow(part=part, state=standing.state, since=standing.since, progress=version)
    if standing.state == _SERVING or standing.state in _BEGINNING:
        return row
    cause = f"{standing.reason}; Ray starts a dead one again, up to five times"
    return row.model_copy(update={"fault": Fault.DEAD_REPLICA, "cause": cause})


def _engines_row(
    part: str, generation: Generation, now: float, thresholds: Thresholds
) -> StatusRow:
    idle_seconds = now - generation.since
    row = StatusRow(
        part=part,
        state="up",
        since=generation.since,
        progress=f"{generation.computed_tokens:.0f} tokens",
    )
    if not generation.attempts_in_flight or idle_seconds <= thresholds.starved:
        return row
    cause = (
        f"no token for {idle_seconds:.0f} s while {generation.attempts_in_flight} attempts are in "
        "flight: they wait for boxes or tests, or the engines hang"
    )
    return row.model_copy(
        update={
            "state": "starved",
            "waits_for": "requests",
            "fault": Fault.STARVED_ENGINE,
            "cause": cause,
        }
    )
