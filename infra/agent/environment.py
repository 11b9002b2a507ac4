"""Environment of an attempt: sandbox, tests, user, and the harness's memory of earlier calls.

A caller makes one per attempt, or per user session, so that a later request still knows the region
read last.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.regions import Region
from ostinato.infra.platform.errors import SandboxError, is_retryable
from ostinato.infra.sandbox.protocol import Sandbox, TestReport

if TYPE_CHECKING:  # records name the environment, and every flow imports records
    from ostinato.infra.agent.loop.attempt import Dialogue
    from ostinato.infra.agent.search.index import LocalSearch
    from ostinato.infra.agent.tools.definition import Tool

RunTests = Callable[[Sandbox], Awaitable[TestReport]]
AskUser = Callable[[str], Awaitable[str]]


class ToolFailure(Exception):
    """The environment refused a call for a reason the model should read."""


class ToolRefusal(Exception):
    """The policy forbids a call. It counts as the model's mistake."""


class ToolTimeout(Exception):
    """A command was ended at its time limit. The message holds its output so far."""


@dataclass(slots=True)
class HarnessState:
    """Memory of the harness about the earlier calls of an attempt."""

    region: Region | None = None
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # of the last search result
    originals: dict[str, str | None] = field(default_factory=dict)  # None: the file is new
    todo: str = ""
    todos: dict[str, str] = field(default_factory=dict)  # item -> its mark
    seen: dict[str, str] = field(default_factory=dict)  # path -> hash of the content last shown
    num_jobs: int = 0  # background commands so far


@dataclass(slots=True)
class AgentEnvironment:
    """The sandbox of an attempt, and the functions behind `pytest`, ask_user and codebase_search."""

    sandbox: Sandbox
    run_tests: RunTests | None = None
    ask_user: AskUser | None = None
    code_search: "LocalSearch | None" = None  # answers codebase_search
    state: HarnessState = field(default_factory=HarnessState)
    policy: ToolPolicy | None = None  # None: the config's
    baseline: Mapping[str, bytes] | None = None  # at the start, for lints; None: as first seen
    tools: "Mapping[str, Tool]" = field(default_factory=dict)  # additional ones: of MCP servers
    dialogue: "Dialogue | None" = None  # runs the dialogue instead of the harness
    ask_limit_seconds: float | None = None  # for a user's answer; None: the limit of a call
    warning: str = ""  # why no test can be run, or plug-ins that some tests miss; empty: neither

    def policy_under(self, config: HarnessConfig) -> ToolPolicy:
        """The environment's own policy, or the harness settings'."""
        return self.policy if self.policy is not None else config.policy

    async def read_text(self, path: str) -> str:
        """A file's text. ToolFailure when there is none."""
        with _answered(f"no file {path}"):
            data = await self.sandbox.read(path)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ToolFailure(f"{path} is not text") from error

    async def list_names(self, path: str) -> tuple[str, ...]:
        """Sorted names in a directory, directories with a slash. ToolFailure when there is none."""
        with _answered(f"no directory {path}"):
            return await self.sandbox.list(path)

    async def write_text(self, path: str, text: str) -> None:
        """Writes a file and remembers its content before the attempt first changed it."""
        if path not in self.state.originals:
            try:
                self.state.originals[path] = await self.read_text(path)
            except ToolFailure:
                self.state.originals[path] = None
        with _answered(f"cannot write {path}"):
            await self.sandbox.write(path, text.encode())

    async def restore_files(self) -> None:
        """Restores the files that tools changed and clears the state. Raises the first failed write."""
        originals = {
            path: None if text is None else text.encode()
            for path, text in self.state.originals.items()
        }
        failed = await self.sandbox.write_files(originals) if originals else {}
        for error in failed.values():
            raise error
        # jobs keep running: a new job must not get the number, and so the files, of an earlier job
        self.state = HarnessState(num_jobs=self.state.num_jobs)

    async def read_original(self, path: str) -> str | None:
        """A file as it was when the attempt began. None when it was not there."""
        if path in self.state.originals:
            return self.state.originals[path]
        if self.baseline is None:
            return await self.read_text(path)
        data = self.baseline.get(path)
        return None if data is None else data.decode(errors="replace")


@contextmanager
def _answered(message: str) -> Iterator[None]:
    """Turns a sandbox's refusal into ToolFailure(message). Retryable errors pass."""
    try:
        yield
    except SandboxError as error:
        if is_retryable(error):
            raise
        raise ToolFailure(message) from error


def content_hash(text: str) -> str:
    """Hash that identifies a content of a file."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
