"""What an attempt works in: a sandbox, the tests, the user, and what the harness remembers of the
attempt.

Owns `AgentEnvironment` and `HarnessState`. A caller makes one per attempt (or per user session, so
that a later request still knows the region read last). It runs nothing itself.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from infra.errors import SandboxError, SandboxLost
from infra.harness.regions import Region
from infra.sandbox.protocol import Sandbox, TestReport

RunTests = Callable[[Sandbox], Awaitable[TestReport]]
AskUser = Callable[[str], Awaitable[str]]


class ToolFailure(Exception):
    """The environment refused a call for a reason the model should read."""


@dataclass(slots=True)
class HarnessState:
    """What the harness knows from earlier calls of the attempt."""

    region: Region | None = None
    originals: dict[str, str | None] = field(default_factory=dict)  # None: the file is new
    todo: str = ""


@dataclass(slots=True)
class AgentEnvironment:
    """The sandbox an attempt works in, and who answers `pytest` and ask_user."""

    sandbox: Sandbox
    run_tests: RunTests | None = None
    ask_user: AskUser | None = None
    state: HarnessState = field(default_factory=HarnessState)

    async def read_text(self, path: str) -> str:
        """A file's text; ToolFailure when there is none."""
        try:
            data = await self.sandbox.read(path)
        except SandboxLost:
            raise
        except SandboxError as error:
            raise ToolFailure(f"no file {path}") from error
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ToolFailure(f"{path} is not text") from error

    async def list_names(self, path: str) -> tuple[str, ...]:
        """Sorted names in a directory, directories with a slash; ToolFailure when there is none."""
        try:
            return await self.sandbox.list(path)
        except SandboxLost:
            raise
        except SandboxError as error:
            raise ToolFailure(f"no directory {path}") from error

    async def write_text(self, path: str, text: str) -> None:
        """Writes a file and remembers what it held before the attempt first changed it."""
        if path not in self.state.originals:
            try:
                self.state.originals[path] = await self.read_text(path)
            except ToolFailure:
                self.state.originals[path] = None
        try:
            await self.sandbox.write(path, text.encode())
        except SandboxLost:
            raise
        except SandboxError as error:
            raise ToolFailure(f"cannot write {path}") from error
