"""Where a served agent works: a sandbox of a known repository with the user's files laid over it.

Owns the `Workplaces` protocol, its real form `RepositoryWorkplaces` (a box pool and a test server a repository), and what
changed (`changed_files`, `unified_diff`). Enters: repository name and files. Leaves: an AgentEnvironment for one request; a box
is held only while the agent works, never while the user thinks.
"""

import difflib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from infra.harness.environment import AgentEnvironment

Files = Mapping[str, bytes | None]
"""Path -> content that differs from the pristine repository; None: removed."""


class Workplaces(Protocol):
    """Sandboxes by repository name."""

    def names(self) -> tuple[str, ...]: ...

    def pristine(self, repository: str) -> Mapping[str, bytes]:
        """Every file as the repository has it."""
        ...

    def lease(
        self, repository: str, files: Files, test_ids: tuple[str, ...] | None
    ) -> AbstractAsyncContextManager[AgentEnvironment]:
        """A clean sandbox for one request; `pytest` in it runs `test_ids` (None: all)."""
        ...


def changed_files(pristine: Mapping[str, bytes], before: Files, after: Files) -> dict[str, bytes | None]:
    """Files that differ between two states of a repository, with their later content."""

    def content(state: Files, path: str) -> bytes | None:
        return state[path] if path in state else pristine.get(path)

    paths = sorted(before.keys() | after.keys())
    return {path: content(after, path) for path in paths if content(before, path) != content(after, path)}


def unified_diff(pristine: Mapping[str, bytes], before: Files, changed: Files) -> str:
    """The changes as a patch; files that are not text are named only."""
    pieces: list[str] = []
    for path, content in changed.items():
        old = before[path] if path in before else pristine.get(path)
        try:
            old_lines = (old or b"").decode().splitlines(keepends=True)
            new_lines = (content or b"").decode().splitlines(keepends=True)
        except UnicodeDecodeError:
            pieces.append(f"Binary files a/{path} and b/{path} differ\n")
            continue
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if content is None else f"b/{path}")
        for line in difflib.unified_diff(old_lines, new_lines, *names):
            pieces.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(pieces)
