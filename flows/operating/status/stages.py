"""Rows of stages: finished, failed, interrupted, killed, not started, and why a live one stands still."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ostinato.flows.operating.status.processes import ProcessTable, are_computing, say_stopped
from ostinato.flows.operating.status.rows import Fault, StatusRow, Thresholds, first_line
from ostinato.flows.operating.status.run_parts import part_rows
from ostinato.flows.stages.run_options import START_FILE, StageStart
from ostinato.infra.platform.cluster.processes import is_alive, is_elsewhere
from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.stage_status import StageStatus
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
_RANK_FOLDERS = (".", "steps")  # of a stage's directory: the trainer of RL has its own
_STEP = "step "  # how the trainer's wait begins while it takes a step
_RUNNING = "running"


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
        """Its newest progress as text."""
        progress = self.progress
        return (
            "" if progress is None else f"{progress.done:g}/{progress.total:g} {progress.message}"
        )

    @property
    def beat_at(self) -> float | None:
        """Its last heartbeat."""
        return _changed_at(self.directory / HEARTBEAT)

    @property
    def last_sign_at(self) -> float | None:
        """Its last heartbeat or progress."""
        signs = (self.beat_at, self.progress.at if self.progress else None)
        return max((sign for sign in signs if sign is not None), default=None)

    def live_ranks(self) -> dict[int, ProcessMark]:
        """Ranks of the attempt under way: marks of an earlier one are older than its process."""
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
        """Oldest first. Those of a running stage's ranks, replicas, engines and boxes after it."""
        for stage in self._stages:
            yield from self._rows_of(stage)

    def idle_seconds(self, since: float) -> float:
        """How long no stage here worked, at most since then."""
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
                # what was left of its progress would read as if it went on
                yield row.model_copy(update={"state": "finished", "since": ended, "progress": ""})
                return
        if stage.mark is not None and is_elsewhere(stage.mark):
            state = {"state": f"on host {stage.mark.host}", "since": stage.beat_at}
            yield row.model_copy(update=state)
        elif stage.mark is not None and is_alive(stage.mark):
            yield from self._live_rows(stage, stage.mark, row)
        else:
            yield self._ended_row(stage, row)

    def _ended_row(self, stage: StageFiles, row: StatusRow) -> StatusRow:
        directory = stage.directory
        failure, ending = (
            read_record(directory / FAILURE, Failure),
            read_record(directory / ENDING, Ending),
        )
        if failure is not None:
            return _failed(row, _changed_at(directory / FAILURE), failure.message)
        if ending is not None and ending.is_error:
            return _failed(row, ending.at, ending.reason)
        again = {"waits_for": "the same command again"}
        if ending is not None:
            told = {"state": "interrupted", "since": ending.at, "cause": first_line(ending.reason)}
            return row.model_copy(update=again | told)
        if stage.mark is None:
            start = read_record(directory / START_FILE, StageStart)
            return row.model_copy(
                update={"waits_for": "its run", "since": start.began_at if start else None}
            )
        cause = (
            f"process {stage.mark.pid} was killed, or the machine restarted; out of memory is usual"
        )
        lost = {"state": "killed", "since": stage.last_sign_at, "fault": Fault.KILLED_STAGE}
        return row.model_copy(update=again | lost | {"cause": cause})

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
        yield self._standstill(stage, mark, sorted(set(members)), row) or row.model_copy(
            update={"state": "running", "since": mark.started_at}
        )
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
            yield from part_rows(stage.part, status, self._now, self._thresholds)

    def _rank_row(self, stage: StageFiles, rank: int, process: ProcessMark) -> StatusRow:
        part = f"{stage.part} rank {rank}"
        if is_elsewhere(process):
            return StatusRow(part=part, state=f"on host {process.host}")
        if self._processes.is_live(process.pid) and is_alive(process):
            return StatusRow(part=part, state="up", since=process.started_at)
        cause = f"rank {rank}, process {process.pid}, is gone and the others wait for it"
        since = stage.progress.at if stage.progress is not None else None
        return StatusRow(part=part, state="dead", since=since, fault=Fault.DEAD_RANK, cause=cause)

    def _standstill(
        self, stage: StageFiles, mark: ProcessMark, members: list[int], row: StatusRow
    ) -> StatusRow | None:
        """The row of a live stage that does nothing. None when it does."""
        stopped = self._processes.stopped(members)
        if stopped:
            return _still(row, stage.last_sign_at, Fault.STOPPED_PROCESS, say_stopped(stopped))
        silent = self._seconds_since(stage.beat_at)
        if silent > self._thresholds.beat:
            cause = f"no heartbeat for {silent:.0f} s: blocked in one call, or out of memory"
            return _still(row, stage.beat_at, Fault.SILENT_STAGE, cause)
        status = stage.status
        late = self._seconds_since(
            status.at if status is not None and status.phase == _RUNNING else None
        )
        if status is not None and late > self._thresholds.status:
            cause = f"no progress for {late:.0f} s: its event loop is blocked in one call"
            return _still(row, status.at, Fault.STALLED_STAGE, cause)
        since = _works_since(stage)
        stalled = self._seconds_since(since)
        if stalled > self._thresholds.progress and not are_computing(
            [mark.pid, *(r.pid for r in stage.live_ranks().values() if not is_elsewhere(r))]
        ):
            cause = (
                f"no progress for {stalled:.0f} s and nothing is computed: a collective, the network "
                "or a lock does not come"
            )
            return _still(row, since, Fault.STALLED_STAGE, cause)
        return None

    def _seconds_since(self, instant: float | None) -> float:
        return 0.0 if instant is None else self._now - instant


def _works_since(stage: StageFiles) -> float | None:
    """When it last made progress. None where it waits for something that it names."""
    status = stage.status
    if status is None:
        return stage.progress.at if stage.progress is not None else None
    trainer = status.waits.get("trainer")
    return trainer.since if trainer is not None and trainer.what.startswith(_STEP) else None


def _still(row: StatusRow, since: float | None, fault: Fault, cause: str) -> StatusRow:
    return row.model_copy(
        update={"state": "stands still", "since": since, "fault": fault, "cause": cause}
    )


def _failed(row: StatusRow, since: float | None, reason: str) -> StatusRow:
    return row.model_copy(
        update={
            "state": "failed",
            "since": since,
            "fault": Fault.FAILED_STAGE,
            "cause": first_line(reason),
        }
    )


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
