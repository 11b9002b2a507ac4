"""Rows of stages: finished, failed, interrupted, killed, not started, and the reason why a live stage stalls."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ostinato.flows.operating.status.processes import ProcessTable, are_computing, say_stopped
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.flows.stages.declared import STAGES, START_FILE, StageStart
from ostinato.infra.platform.cluster.processes import is_alive, is_elsewhere
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.stage_status import (
    DecodingActivity,
    ReplicaStatus,
    StageStatus,
)
from ostinato.infra.platform.cluster.workspace import (
    ENDING,
    FAILURE,
    HEARTBEAT,
    PROCESS,
    PROGRESS,
    PUBLISHED,
    RESULT,
    STATUS,
    Ending,
    Failure,
    ProcessMark,
    Progress,
    read_record,
)

_SUPERSEDED = ".superseded-"
_RANK_FOLDERS = (".", "steps")  # folders with marks of ranks: the stage's, and RL's trainer's
_STEP = "step "  # prefix of the trainer's wait during a step
_RUNNING = "running"
# copied from infra/serving/engine/health.py, because importing its package would load torch
_SERVING, _STARTING = "serving", ("starting", "restarting")


@dataclass(frozen=True)
class StageFiles:
    """Files of a stage's directory."""

    directory: Path
    mark: ProcessMark | None
    progress: Progress | None
    status: StageStatus | None
    ranks: dict[int, ProcessMark]

    @classmethod
    def read(cls, directory: Path) -> "StageFiles":
        ranks: dict[int, ProcessMark] = {}
        for folder in _RANK_FOLDERS:
            ranks |= marked_ranks(directory / folder)
        return cls(
            directory,
            read_record(directory / PROCESS, ProcessMark),
            read_record(directory / PROGRESS, Progress),
            read_record(directory / STATUS, StageStatus),
            ranks,
        )

    @property
    def part(self) -> str:
        """Name of the stage's row."""
        return f"{self.directory.parent.name} {self.directory.name}"

    @property
    def seen(self) -> str:
        """The newest progress as text."""
        seen = self.progress
        return "" if seen is None else f"{seen.done:g}/{seen.total:g} {seen.message}"

    @property
    def doing(self) -> str:
        """Stage and newest progress in words, such as `reinforcement of nano-seed0 is at step 12 of 26`."""
        kind, seen = self.directory.name.rpartition("-")[0], self.progress
        made_by = next((stage for stage in STAGES.values() if stage.kind == kind), None)
        named = f"{kind if made_by is None else made_by.name} of {self.directory.parent.name}"
        if seen is None or seen.total <= 0:
            return f"{named} starts"
        unit = "step " if made_by is not None and made_by.trains else ""
        return f"{named} is at {unit}{seen.done:g} of {seen.total:g}"

    @property
    def heartbeat_at(self) -> float | None:
        """Instant of the last heartbeat."""
        return _changed_at(self.directory / HEARTBEAT)

    @property
    def last_sign_at(self) -> float | None:
        """Instant of the last heartbeat or progress."""
        signs = (self.heartbeat_at, self.progress.at if self.progress else None)
        return max((sign for sign in signs if sign is not None), default=None)

    def live_ranks(self) -> dict[int, ProcessMark]:
        """Ranks of the current attempt. Marks of an earlier attempt are older than the stage's process."""
        if self.mark is None:
            return {}
        began = self.mark.started_at
        return {rank: mark for rank, mark in self.ranks.items() if mark.started_at >= began}


class StageRows:
    """Rows of all stages of a home."""

    def __init__(
        self, home: Path, processes: ProcessTable, now: float, thresholds: Thresholds
    ) -> None:
        self._processes, self._now, self._thresholds = processes, now, thresholds
        folders = (path for path in (home / "runs").glob("*/*") if path.is_dir())
        ordered = sorted(folders, key=lambda path: path.stat().st_mtime)
        self._stages = [StageFiles.read(path) for path in ordered if _SUPERSEDED not in path.name]

    def rows(self) -> Iterator[StatusRow]:
        """Rows of stages, oldest first, each followed by rows of its ranks, replicas, engines and boxes."""
        for stage in self._stages:
            yield from self._rows_of(stage)

    def idle_seconds(self, since: float) -> float:
        """Time for which no stage of this home has run, counted from `since` at the earliest."""
        last = since
        for stage in self._stages:
            if stage.mark is not None and is_alive(stage.mark):
                return 0.0
            ended = _changed_at(stage.directory / PUBLISHED)
            last = max(last, stage.last_sign_at or 0.0, ended or 0.0)
        return self._now - last

    def _rows_of(self, stage: StageFiles) -> Iterator[StatusRow]:
        row = StatusRow(part=stage.part, state="not started", progress=stage.seen)
        for name in (PUBLISHED, RESULT):
            ended = _changed_at(stage.directory / name)
            if ended is not None:
                # a stage's last progress would look as if it still ran
                yield row.changed(state="finished", since=ended, progress="")
                return
        if stage.mark is not None and is_elsewhere(stage.mark):
            yield row.changed(state=f"on host {stage.mark.host}", since=stage.heartbeat_at)
        elif stage.mark is not None and is_alive(stage.mark):
            yield from self._live_rows(stage, stage.mark, row)
        else:
            yield self._ended_row(stage, row)

    def _ended_row(self, stage: StageFiles, row: StatusRow) -> StatusRow:
        directory = stage.directory
        failure = read_record(directory / FAILURE, Failure)
        ending = read_record(directory / ENDING, Ending)
        if failure is not None:
            return _failed(row, _changed_at(directory / FAILURE), failure.message)
        if ending is not None and ending.is_error:
            return _failed(row, ending.at, ending.reason)
        if ending is None and stage.mark is None:
            start = read_record(directory / START_FILE, StageStart)
            return row.changed(waits_for="its run", since=start.began_at if start else None)
        row = row.changed(waits_for="the same command again")
        if ending is not None:
            cause = first_line(ending.reason)
            return row.changed(state="interrupted", since=ending.at, cause=cause)
        pid = 0 if stage.mark is None else stage.mark.pid
        cause = f"process {pid} was killed, or the machine restarted; out of memory is usual"
        since = stage.last_sign_at
        return row.changed(state="killed", since=since, fault=Fault.KILLED_STAGE, cause=cause)

    def _live_rows(
        self, stage: StageFiles, mark: ProcessMark, row: StatusRow
    ) -> Iterator[StatusRow]:
        ranks = stage.live_ranks()
        members = self._processes.family(mark.pid) + [
            member
            for rank in ranks.values()
            if not is_elsewhere(rank)
            for member in self._processes.family(rank.pid)
        ]
        if stage.progress is not None and stage.progress.total > 0:
            row = row.changed(done_ratio=min(1.0, stage.progress.done / stage.progress.total))
        stalled = self._diagnose_stall(stage, mark, sorted(set(members)), row)
        yield stalled or row.changed(state="running", since=mark.started_at, doing=stage.doing)
        status = stage.status
        is_running = status is None or status.phase == _RUNNING
        for rank, process in ranks.items() if is_running else ():
            yield self._rank_row(stage, rank, process)
        if status is None:
            return
        for name, wait in status.waits.items():
            yield StatusRow(
                part=f"{stage.part} {name}",
                state="waiting",
                waits_for=f"{wait.what} ({wait.detail})",
                since=wait.since,
            )
        if status.phase == _RUNNING:
            for part in _part_rows(stage.part, status, self._now, self._thresholds):
                yield part.changed(stage=stage.part)

    def _rank_row(self, stage: StageFiles, rank: int, process: ProcessMark) -> StatusRow:
        part = f"{stage.part} rank {rank}"
        if is_elsewhere(process):
            return StatusRow(part=part, state=f"on host {process.host}")
        if self._processes.is_live(process.pid) and is_alive(process):
            return StatusRow(part=part, state="up", since=process.started_at)
        cause = f"rank {rank}, process {process.pid}, is gone and the others wait for it"
        since = stage.progress.at if stage.progress is not None else None
        return StatusRow(part=part, state="dead", since=since, fault=Fault.DEAD_RANK, cause=cause)

    def _diagnose_stall(
        self, stage: StageFiles, mark: ProcessMark, members: list[int], row: StatusRow
    ) -> StatusRow | None:
        """The row of a live stage that makes no progress, with the cause. None for a stage that works."""
        stopped = self._processes.stopped(members)
        if stopped:
            return _stalled(row, stage.last_sign_at, Fault.STOPPED_PROCESS, say_stopped(stopped))
        silent = self._seconds_since(stage.heartbeat_at)
        if silent > self._thresholds.heartbeat:
            cause = f"no heartbeat for {silent:.0f} s: blocked in one call, or out of memory"
            return _stalled(row, stage.heartbeat_at, Fault.SILENT_STAGE, cause)
        status = stage.status
        late = self._seconds_since(
            status.at if status is not None and status.phase == _RUNNING else None
        )
        if status is not None and late > self._thresholds.status:
            cause = f"no progress for {late:.0f} s: its event loop is blocked in one call"
            return _stalled(row, status.at, Fault.STALLED_STAGE, cause)
        since = _last_progress_at(stage)
        stalled = self._seconds_since(since)
        if stalled > self._thresholds.progress and not are_computing(
            [mark.pid, *(r.pid for r in stage.live_ranks().values() if not is_elsewhere(r))]
        ):
            cause = (
                f"no progress for {stalled:.0f} s and nothing is computed: it waits for a collective, the network "
                "or a lock"
            )
            return _stalled(row, since, Fault.STALLED_STAGE, cause)
        return None

    def _seconds_since(self, instant: float | None) -> float:
        return 0.0 if instant is None else self._now - instant


def _last_progress_at(stage: StageFiles) -> float | None:
    """Time of the stage's last progress. None when it reports what it waits for."""
    status = stage.status
    if status is None:
        return stage.progress.at if stage.progress is not None else None
    trainer = status.waits.get("trainer")
    return trainer.since if trainer is not None and trainer.what.startswith(_STEP) else None


def _stalled(row: StatusRow, since: float | None, fault: Fault, cause: str) -> StatusRow:
    return row.changed(state="halted", since=since, fault=fault, cause=cause)


def _failed(row: StatusRow, since: float | None, reason: str) -> StatusRow:
    cause = first_line(reason)
    return row.changed(state="failed", since=since, fault=Fault.FAILED_STAGE, cause=cause)


def _part_rows(
    stage: str, status: StageStatus, now: float, thresholds: Thresholds
) -> Iterator[StatusRow]:
    """Rows of replicas, engines and boxes of a running RL stage, from its `status.json`."""
    for name, replica in sorted(status.replicas.items()):
        yield _replica_row(f"{stage} replica {name.rpartition('.')[2]}", replica)
    if status.generation is not None and status.replicas:
        yield _engines_row(f"{stage} engines", status.generation, now, thresholds)
    if status.boxes is not None:
        boxes = status.boxes
        row = StatusRow(part=f"{stage} boxes", state="up", progress=f"{boxes.leased} in use")
        since = boxes.waiting_since
        if since is not None:
            row = row.changed(waits_for=f"boxes, {boxes.waiting} attempts", since=since)
            if now - since > thresholds.starved:
                cause = (
                    f"{boxes.waiting} attempts wait for a box, the longest for {now - since:.0f} s: "
                    "boxes start slowly or are not given back"
                )
                row = row.changed(state="starved", fault=Fault.STARVED_BOXES, cause=cause)
        yield row


def _replica_row(part: str, replica: ReplicaStatus) -> StatusRow:
    version = "" if replica.version is None else f"version {replica.version}"
    row = StatusRow(part=part, state=replica.state, since=replica.since, progress=version)
    if replica.state == _SERVING or replica.state in _STARTING:
        return row
    cause = f"{replica.reason}; Ray restarts a dead one up to five times"
    return row.changed(fault=Fault.DEAD_REPLICA, cause=cause)


def _engines_row(
    part: str, generation: DecodingActivity, now: float, thresholds: Thresholds
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
    return row.changed(
        state="starved", waits_for="requests", fault=Fault.STARVED_ENGINE, cause=cause
    )


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
