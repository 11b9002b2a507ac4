"""What callers and sandboxes say to one another: the records, and the protocols of a backend and of
one sandbox.

Three protocols: `Sandbox` is the little an attempt needs, `LiveSandbox` adds sessions, jobs, batched
files, snapshots and forks, `SandboxBackend` makes sandboxes. What a backend cannot do it declares
in `Capabilities`. A command that fails is a result; an exception is typed (infra/platform/errors.py), and its
`retryable_infrastructure` says whether we or the agent are to blame. Nothing here starts a process.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from ostinato.infra.platform.errors import SandboxError


class SandboxRecord(BaseModel):
    """Frozen; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SandboxLimits(SandboxRecord):
    """What one box may use."""

    memory_bytes: int = Field(
        default=512 << 20, description="whole box; enforced by cgroup where writable"
    )
    process_memory_bytes: int = Field(default=1 << 30, description="address space of one process")
    processes: int = Field(default=128, description="processes and threads in the box")
    file_bytes: int = Field(default=64 << 20, description="largest single file")
    writable_bytes: int = Field(default=256 << 20, description="size of /repo and of /tmp, each")
    start_seconds: float = Field(
        default=30.0, description="a box that has not answered by then is lost"
    )
    test_memory_bytes: int = Field(
        default=384 << 20, description="what one test run may allocate on top"
    )
    test_cpu_seconds: float = Field(
        default=1.0, description="CPU time of one test; more is a timeout"
    )
    num_cpus: float | None = Field(
        default=None, description="processors the whole box may use; None: no limit of its own"
    )


class ExecResult(SandboxRecord):
    """How a command ended.

    `output` is stdout and stderr as they came (stdout alone when they were asked for apart), cut in
    the middle when `truncated`.
    """

    exit_code: int = Field(description="negative: ended by that signal")
    output: bytes
    truncated: bool
    timed_out: bool
    wall_seconds: float
    stderr: bytes = Field(default=b"", description="empty unless asked for apart from stdout")
    out_of_memory: bool = Field(
        default=False, description="the kernel ended a process of the box for memory meanwhile"
    )
    cpu_seconds: float = Field(
        default=0.0, description="of the command and the children it waited for"
    )


class Capabilities(SandboxRecord):
    """What a backend can do beyond commands and files; asking for the rest is InvalidArgument."""

    file_snapshot: bool = Field(default=False, description="snapshot(FILES), restore")
    memory_snapshot: bool = Field(default=False, description="snapshot(MEMORY): processes too")
    fork: bool = Field(default=False, description="new sandboxes from a snapshot")
    live_fork: bool = Field(default=False, description="new sandboxes from one that runs")
    own_kernel: bool = Field(default=False, description="a virtual machine, not a namespace")
    hard_limits: bool = Field(
        default=False, description="memory and processes of the whole box are limited, not of each"
    )


class SnapshotKind(StrEnum):
    """What a snapshot holds."""

    FILES = "files"  # the repository folder; processes start anew
    MEMORY = "memory"  # files, memory and every process


class Snapshot(SandboxRecord):
    """A state to start sandboxes from. Immutable; equal content gives an equal id."""

    snapshot_id: str = Field(description="hash of the content and of the parent's id")
    kind: SnapshotKind
    parent_id: str | None = Field(description="snapshot it builds on; None: the spec's repository")
    num_files: int = Field(description="files written or removed since the parent")
    num_bytes: int = Field(description="what this snapshot adds on disk")
    num_layers: int = Field(default=1, description="layers below a sandbox started from it")


class SandboxSpec(SandboxRecord):
    """What a sandbox is made of."""

    template: str = Field(default="default", description="image of the system around /repo")
    repository: Path | None = Field(
        default=None,
        description="host folder seen at /repo; never written, must not change; None: empty",
    )
    files: Mapping[str, bytes | None] = Field(
        default_factory=dict, description="laid over the repository; None: removed"
    )
    environment: Mapping[str, str] = Field(default_factory=dict)
    limits: SandboxLimits = SandboxLimits()
    ttl_seconds: float = Field(
        default=1800.0, gt=0.0, description="without a renewal for so long it may be reaped"
    )
    labels: Mapping[str, str] = Field(default_factory=dict)
    client_key: str = Field(
        default="", description="a second create with the same key gives the same sandbox"
    )


class SandboxStats(SandboxRecord):
    """What a sandbox uses now."""

    memory_bytes: int
    cpu_seconds: float
    num_processes: int
    written_bytes: int = Field(description="in /repo, since it was made")
    expires_in_seconds: float


class JobLogs(SandboxRecord):
    """Part of what a background job printed, by its place in all it printed."""

    data: bytes
    offset_bytes: int = Field(description="place of `data`; later than asked when that was dropped")
    next_offset_bytes: int
    is_running: bool
    exit_code: int | None = Field(description="None while it runs; negative: ended by that signal")


class ReadRequest(SandboxRecord):
    """Bytes of a file."""

    path: str
    offset_bytes: int = Field(default=0, ge=0)
    max_bytes: int | None = Field(
        default=None, description="None: the whole file, OutputLimit when it is over 8 MiB"
    )


class WriteRequest(SandboxRecord):
    """A file to replace atomically; folders are made."""

    path: str
    content: bytes
    expected_sha256: str | None = Field(
        default=None,
        description="hex of the content it must have now; empty: must not exist; None: any",
    )
    is_executable: bool = False


class FileKind(StrEnum):
    """What a path is; links are not followed."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class FileStatus(SandboxRecord):
    """A path in a sandbox."""

    path: str
    kind: FileKind
    num_bytes: int
    modified_ns: int
    is_executable: bool


class TestOutcome(StrEnum):
    """What happened to one requested test; only PASSED counts."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # set-up, tear-down or import failed
    SKIPPED = "skipped"  # skipped or expected to fail: never a pass
    TIMEOUT = "timeout"  # over its CPU or wall time, or killed for memory
    MISSING = "missing"  # never reported: not collected, or the run ended before it


class Frame(SandboxRecord):
    """One traceback frame inside the repository, outermost first in a failure."""

    path: str
    line_number: int


class TestFailure(SandboxRecord):
    """The first test that did not pass."""

    __test__ = False

    test_id: str
    error_type: str
    message: str
    frames: tuple[Frame, ...]


class TestReport(SandboxRecord):
    """One run of named tests on the repository with some files changed."""

    __test__ = False

    outcomes: dict[str, TestOutcome] = Field(description="exactly the requested ids")
    first_failure: TestFailure | None = None
    tampering: str = Field(
        default="", description="what in the run shows an attack on the runner; empty: nothing"
    )
    route: str = Field(description="hot, cold or full: how the changed files were applied")
    seconds: float = Field(description="wall time inside the box, fork to last result")
    cpu_seconds: float = Field(
        default=0.0, description="CPU time of the run, the fork's own included"
    )
    from_cache: bool = False

    @property
    def passed(self) -> bool:
        """Whether every requested test passed in an honest run."""
        return not self.tampering and all(
            value is TestOutcome.PASSED for value in self.outcomes.values()
        )

    @property
    def passed_ids(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(
            test for test, value in self.outcomes.items() if value is TestOutcome.PASSED
        )


class Sandbox(Protocol):
    """A place where an agent's commands run.

    Paths are relative to the repository unless they begin with /tmp/.
    """

    async def exec(
        self, command: str, timeout_seconds: float, output_cap_bytes: int = 16_384
    ) -> ExecResult: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, content: bytes) -> None: ...

    async def list(self, path: str = ".") -> tuple[str, ...]: ...

    async def diff(self) -> dict[str, bytes | None]: ...

    async def reset(self, files: Mapping[str, bytes | None] | None = None) -> None: ...

    async def close(self) -> None: ...


class Commands(Protocol):
    """Commands, sessions and jobs of one sandbox.

    A command has its own process group; at its time limit the group gets TERM, then KILL, and what
    it printed is kept. Its stdin is empty unless given.
    """

    async def exec(
        self,
        command: str | Sequence[str],
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        directory: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        separate_stderr: bool = False,
    ) -> ExecResult:
        """Run a shell command (str) or a program with arguments (anything else)."""
        ...

    async def open_session(
        self, *, directory: str = ".", environment: Mapping[str, str] | None = None
    ) -> str:
        """Start a shell that keeps its folder and variables; its id."""
        ...

    async def run_in_session(
        self, session_id: str, command: str, timeout_seconds: float, output_cap_bytes: int = 16_384
    ) -> ExecResult:
        """Run in a session, one command at a time (SandboxBusy).

        A command over its time is interrupted; a shell that ignores that, or exits, is gone, and
        the next run in it is SandboxNotFound.
        """
        ...

    async def signal_session(self, session_id: str, signal_number: int) -> None: ...

    async def close_session(self, session_id: str) -> None: ...

    async def start_job(
        self,
        command: str | Sequence[str],
        *,
        directory: str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> str:
        """Start a background job; its id. It runs until it ends, is killed, or the box closes."""
        ...

    async def read_job_logs(
        self, job_id: str, offset_bytes: int = 0, max_bytes: int = 65_536
    ) -> JobLogs: ...

    async def wait_job(self, job_id: str, timeout_seconds: float) -> JobLogs:
        """The end of a job's output and its exit code; SandboxTimeout while it still runs."""
        ...

    async def kill_job(self, job_id: str, signal_number: int = 9) -> None: ...


class Files(Protocol):
    """Files of one sandbox, below /repo, /tmp and /dev/shm only, whatever links say."""

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, content: bytes) -> None: ...

    async def list(self, path: str = ".") -> tuple[str, ...]: ...

    async def read_files(self, requests: Sequence[ReadRequest]) -> tuple[bytes | SandboxError, ...]:
        """Many reads in one round trip, answered in their order; a failed one is its error."""
        ...

    async def write_files(
        self, requests: Sequence[WriteRequest]
    ) -> tuple[SandboxError | None, ...]:
        """Many writes in one round trip; each alone is atomic, they are not so together."""
        ...

    async def list_files(self, path: str = ".", *, max_depth: int = 1) -> tuple[FileStatus, ...]:
        """What is below a folder, by path; OutputLimit over 20,000 entries."""
        ...

    async def stat(self, paths: Sequence[str]) -> tuple[FileStatus | None, ...]:
        """None: nothing there."""
        ...

    async def remove(self, paths: Sequence[str]) -> tuple[SandboxError | None, ...]:
        """Remove files, links, and folders with all below them."""
        ...


class LiveSandbox(Commands, Files, Protocol):
    """One running sandbox of any backend. Belongs to the event loop that made it."""

    @property
    def sandbox_id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def is_lost(self) -> bool: ...

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Freeze what is there now; the sandbox goes on."""
        ...

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Regular files of /repo that differ from `base` (None: as created); None: removed."""
        ...

    async def stats(self) -> SandboxStats: ...

    async def renew(self, ttl_seconds: float | None = None) -> None:
        """Count the time to live from now; None: as long as the spec said."""
        ...

    async def close(self) -> None: ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind on this host. Belongs to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> LiveSandbox:
        """A sandbox whose server answers; CapacityExhausted or SandboxLost when it does not."""
        ...

    async def fork(self, source: Snapshot | LiveSandbox, count: int = 1) -> Sequence[LiveSandbox]:
        """New sandboxes in the state of `source`; a running source goes on undisturbed."""
        ...

    async def restore(self, snapshot: Snapshot) -> LiveSandbox:
        """One new sandbox in that state."""
        ...

    async def list_sandboxes(
        self, labels: Mapping[str, str] | None = None
    ) -> Sequence[LiveSandbox]:
        """Running sandboxes that carry all these labels."""
        ...

    async def reap(self) -> tuple[str, ...]:
        """Close those past their time to live and those lost; their ids."""
        ...

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Free its space; SandboxBusy while a sandbox or another snapshot stands on it."""
        ...

    async def close(self) -> None:
        """End every sandbox and free every snapshot."""
        ...
