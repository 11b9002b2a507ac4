"""Records and protocols of sandboxes: `Sandbox` is one box to work in, `SandboxBackend` makes them.

A command that fails is a result. An exception is typed, and `is_retryable` (infra/platform/errors.py)
tells infrastructure faults from mistakes of the agent.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import Field

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.platform.record import Record

# Readable in every box, so no problem may be made of them.
RUNNER_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


class SandboxKind(StrEnum):
    """Kinds of sandboxes that a recipe can name."""

    NAMESPACE = "namespace"
    MICROVM = "microvm"


class SandboxLimits(Record):
    """Resource limits of one box."""

    memory_bytes: int = 512 << 20
    """whole box; enforced by cgroup where writable"""
    process_memory_bytes: int = Field(default=1 << 30, description="address space of one process")
    processes: int = Field(default=128, description="processes and threads in the box")
    file_bytes: int = Field(default=64 << 20, description="largest single file")
    writable_bytes: int = Field(default=256 << 20, description="size of /repo and of /tmp, each")
    start_seconds: float = 30.0
    """a box that has not answered by then is lost"""
    test_memory_bytes: int = 384 << 20
    """memory that one test run may allocate on top"""
    test_cpu_seconds: float = 1.0
    """CPU time of one test; more is a timeout"""


class ExecResult(Record):
    """Result of a command.

    `output` is stdout and stderr as they came, cut in the middle when `truncated`.
    """

    exit_code: int = Field(description="negative: ended by that signal")
    output: bytes
    truncated: bool
    timed_out: bool
    wall_seconds: float


class SnapshotKind(StrEnum):
    """Content of a snapshot."""

    FILES = "files"  # the repository folder; processes start anew
    MEMORY = "memory"  # files, memory and every process


class Snapshot(Record):
    """A state to start sandboxes from. Immutable. Equal content gives an equal id."""

    snapshot_id: str = Field(description="hash of the content")
    kind: SnapshotKind


class SandboxSpec(Record):
    """Specification of a sandbox."""

    template: str = Field(default="default", description="image of the system around /repo")
    repository: Path | None = None
    """host folder seen at /repo; never written, must not change; None: empty"""
    files: Mapping[str, bytes | None] = Field(default_factory=dict)
    """laid over the repository; None: removed"""
    limits: SandboxLimits = SandboxLimits()


class TestOutcome(StrEnum):
    """Outcome of one requested test. Only PASSED counts."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # set-up, tear-down or import failed
    SKIPPED = "skipped"  # skipped or expected to fail: never a pass
    TIMEOUT = "timeout"  # over its CPU or wall time, or killed for memory
    MISSING = "missing"  # never reported: not collected, or the run ended before it


class Frame(Record):
    """One traceback frame inside the repository, outermost first in a failure."""

    path: str
    line_number: int


class TestFailure(Record):
    """The first test that did not pass."""

    __test__ = False

    test_id: str
    error_type: str
    message: str
    frames: tuple[Frame, ...]


class TestReport(Record):
    """One run of named tests on the repository with some files changed."""

    __test__ = False

    outcomes: dict[str, TestOutcome] = Field(description="exactly the requested ids")
    first_failure: TestFailure | None = None
    tampering: str = ""
    """sign in the run of an attack on the runner; empty: none"""
    route: str = Field(
        description="fresh, killed (the run did not come to its end) or plain: the second runner"
    )
    seconds: float = Field(description="wall time inside the box, fork to last result")
    cpu_seconds: float = 0.0
    """CPU time of the run, the fork's own included"""

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
    """One box with a repository at /repo. Belongs to the event loop that made it.

    Paths are relative to /repo unless they begin with /tmp/ or /dev/shm/, and no tool leaves these
    three folders, whatever links say.
    """

    @property
    def sandbox_id(self) -> str: ...

    @property
    def is_lost(self) -> bool:
        """Whether the box is gone. Every operation then raises SandboxLost."""
        ...

    async def exec(
        self,
        command: str,
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        *,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a shell command in /repo.

        It has its own process group, which gets TERM and then KILL at the time limit; what it
        printed is kept, the middle left out over the cap.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Content of a file. OutputLimit over 8 MiB."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file atomically. Folders are made, an executable bit stays."""
        ...

    async def list(self, path: str = ".") -> tuple[str, ...]:
        """Sorted names in a folder. Folders end with a slash. OutputLimit over 20,000."""
        ...

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        """Writes and removes (None) files in one round trip. Returns the errors by path.

        Each write is atomic, the batch is not.
        """
        ...

    async def diff(self, base: Snapshot | None = None) -> dict[str, bytes | None]:
        """Regular files of /repo that differ from `base`. None as content: removed.

        Without a base: from the repository itself, so files that the spec laid over it differ too.
        """
        ...

    async def snapshot(self, kind: SnapshotKind = SnapshotKind.FILES) -> Snapshot:
        """Freeze what is there now. The sandbox goes on."""
        ...

    async def close(self) -> None:
        """End the box and everything in it. A second close does nothing."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind on this host. Belongs to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_memory(self) -> bool:
        """Whether it has snapshots of kind MEMORY, which keep processes too."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox that answers. CapacityExhausted or SandboxLost when it does not."""
        ...

    async def fork(self, source: Snapshot | Sandbox, count: int = 1) -> Sequence[Sandbox]:
        """New sandboxes in the state of `source`. A running source goes on undisturbed."""
        ...

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Forget it. Sandboxes that were started from it go on. SandboxNotFound a second time."""
        ...

    async def close(self) -> None:
        """End every sandbox and free every snapshot."""
        ...
