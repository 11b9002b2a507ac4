"""Records and protocols of sandboxes: `Sandbox` is one box to work in, `SandboxBackend` creates boxes.

A command that fails is a result, not an exception. Exceptions are typed, and `is_retryable`
(infra/platform/errors.py) tells infrastructure faults from mistakes of the agent.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import Field

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.record import Record

# Every box can read these packages, so no problem may be made from their repositories.
RUNNER_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


class SandboxKind(StrEnum):
    """Kinds of sandboxes that a recipe can name."""

    NAMESPACE = "namespace"
    MICROVM = "microvm"


class SandboxLimits(Record):
    """Resource limits of one box."""

    memory_bytes: int = 512 << 20
    """memory of the whole box; enforced by a control group where the host allows one"""
    process_memory_bytes: int = Field(default=1 << 30, description="address space of one process")
    processes: int = Field(default=128, description="processes and threads in the box")
    file_bytes: int = Field(default=64 << 20, description="largest single file")
    writable_bytes: int = Field(default=256 << 20, description="size of /repo and of /tmp, each")
    start_seconds: float = 30.0
    """time within which a new box must answer; after that it counts as lost"""
    test_memory_bytes: int = 384 << 20
    """memory that one test run may allocate beyond what its process holds at the start"""
    test_cpu_seconds: float = 1.0
    """CPU time of one test; a test that uses more gets the outcome TIMEOUT"""


class ExecResult(Record):
    """Result of a command.

    `output` is stdout and stderr interleaved as written; `truncated` says that its middle is left out.
    """

    exit_code: int = Field(description="negative: minus the signal that ended the command")
    output: bytes
    truncated: bool
    timed_out: bool
    wall_seconds: float


class SnapshotKind(StrEnum):
    """Content of a snapshot."""

    FILES = "files"  # the repository folder; no processes are kept
    MEMORY = "memory"  # files, memory and every process


class Snapshot(Record):
    """An immutable state from which sandboxes start. Equal content gives an equal id."""

    snapshot_id: str = Field(description="hash of the content")
    kind: SnapshotKind


class SandboxSpec(Record):
    """Specification of a sandbox."""

    template: str = Field(default="default", description="image of the system around /repo")
    repository: Path | None = None
    """host folder shown at /repo; the box never writes to it, and it must not change; None: an empty /repo"""
    files: Mapping[str, bytes | None] = Field(default_factory=dict)
    """contents written over the repository, by path; None: removed"""
    mounts: Mapping[str, Path] = Field(default_factory=dict)
    """host folders and listening sockets of the host, by their path in the box; read-only"""
    import_roots: tuple[str, ...] = ()
    """folders of the repository on the import path of every Python in the box"""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """environment variables of every command, in addition to those of every box"""
    limits: SandboxLimits = SandboxLimits()


class TestOutcome(StrEnum):
    """Outcome of one requested test. Only PASSED counts."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # set-up, tear-down or import failed
    SKIPPED = "skipped"  # skipped or expected to fail: never a pass
    TIMEOUT = "timeout"  # exceeded its CPU or wall time, or was killed
    MISSING = "missing"  # never reported: not collected, or the run ended before it


class Frame(Record):
    """One traceback frame inside the repository."""

    path: str
    line_number: int


class TestFailure(Record):
    """Failure of the first test that did not pass."""

    __test__ = False

    test_id: str
    error_type: str
    message: str
    frames: tuple[Frame, ...]  # outermost first


class TestReport(Record):
    """One run of named tests on the repository with some files changed."""

    __test__ = False

    outcomes: dict[str, TestOutcome] = Field(description="exactly the requested ids")
    first_failure: TestFailure | None = None
    tampering: str = ""
    """signs that the tested code attacked the test runner; empty: none"""
    route: str = Field(
        description="fresh, killed (the run did not finish) or plain (the second runner)"
    )
    seconds: float = Field(description="wall time; on the fresh route, without imports")
    cpu_seconds: float = 0.0
    """CPU time of the process that ran the tests, its imports included"""

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
    """One box with a repository at /repo. Belongs to the event loop that created it.

    Paths are relative to /repo unless they begin with /tmp/ or /dev/shm/. File operations never leave
    these three folders, not even through symbolic links.
    """

    @property
    def sandbox_id(self) -> str: ...

    @property
    def is_lost(self) -> bool:
        """Whether the box is gone, so that every operation raises the error that ended it."""
        ...

    async def exec(
        self,
        command: str,
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a shell command in /repo.

        It has its own process group, which gets TERM and then KILL at the time limit. Its output is kept
        even then. Over the cap, the middle of the output is left out.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Content of a file. Raises OutputLimit over 8 MiB."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Replaces a file atomically. Creates missing folders and keeps an executable bit."""
        ...

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Sorted names in a folder; names of folders end with a slash. Raises OutputLimit over 20,000."""
        ...

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        """Writes and removes (None) files in one round trip. Returns the errors by path.

        Each write is atomic; the batch is not.
        """
        ...

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Regular files of /repo that differ from `base`. None as content: removed.

        Without a base, the comparison is with the repository itself, so files of the spec differ too.
        """
        ...

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """A snapshot of the present state. The sandbox keeps running."""
        ...

    async def close(self) -> None:
        """Ends the box and everything in it. A second close does nothing."""
        ...


class SandboxBackend(Protocol):
    """Creates sandboxes of one kind on this host. Belongs to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_memory(self) -> bool:
        """Whether snapshots of kind MEMORY, which include running processes, are supported."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox that answers. Raises CapacityExhausted or SandboxLost when it does not."""
        ...

    async def fork(self, source: Snapshot | Sandbox, count: int = 1) -> Sequence[Sandbox]:
        """New sandboxes in the state of `source`. A running source keeps running."""
        ...

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Removes a snapshot. Sandboxes started from it keep running. A second call raises SandboxNotFound."""
        ...

    async def close(self) -> None:
        """Ends every sandbox and removes every snapshot."""
        ...
