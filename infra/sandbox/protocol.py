"""What callers and sandboxes say to one another: limits, results, reports, and the `Sandbox`
protocol.

Owns the records of the sandbox layer. A command that fails is a result; an exception means
infrastructure (`SandboxLost`, `CapacityExhausted`) or a caller's mistake (`SandboxError`). Nothing
here starts a process.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field


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


class ExecResult(SandboxRecord):
    """How a command ended.

    `output` is stdout and stderr as they came, cut in the middle when `truncated`.
    """

    exit_code: int = Field(description="negative: ended by that signal")
    output: bytes
    truncated: bool
    timed_out: bool
    wall_seconds: float


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
