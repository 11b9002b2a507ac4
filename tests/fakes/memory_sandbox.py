"""A sandbox that is a dictionary of files; commands are answered by a function the test gives."""

from collections.abc import Callable, Mapping

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox.protocol import ExecResult


class MemorySandbox:
    """Implements the `Sandbox` protocol without a process."""

    def __init__(
        self, files: Mapping[str, bytes], run: Callable[[str], tuple[int, bytes]] | None = None
    ) -> None:
        self.pristine = dict(files)
        self.files = dict(files)
        self.run = run
        self.commands: list[str] = []
        self.is_lost = False
        self.loss = SandboxLost("the box is gone")

    async def exec(
        self,
        command: str,
        timeout_seconds: float,
        output_cap_bytes: int = 16_384,
        stdin: bytes = b"",
    ) -> ExecResult:
        if self.is_lost:
            raise self.loss
        self.commands.append(command)
        exit_code, output = self.run(command) if self.run else (0, b"")
        return ExecResult(
            exit_code=exit_code, output=output, truncated=False, timed_out=False, wall_seconds=0.0
        )

    async def read(self, path: str) -> bytes:
        if self.is_lost:
            raise self.loss
        if path not in self.files:
            raise SandboxError(f"no file {path}")
        return self.files[path]

    async def write(self, path: str, content: bytes) -> None:
        self.files[path] = content

    async def list(self, path: str = ".") -> tuple[str, ...]:
        prefix = "" if path in ("", ".") else path.strip("/") + "/"
        inside = [file[len(prefix) :] for file in self.files if file.startswith(prefix)]
        if not inside:
            raise SandboxError(f"no directory {path}")
        return tuple(sorted({"".join(name.partition("/")[:2]) for name in inside}))

    async def diff(self) -> dict[str, bytes | None]:
        changed: dict[str, bytes | None] = {
            path: content
            for path, content in self.files.items()
            if self.pristine.get(path) != content
        }
        changed.update({path: None for path in self.pristine if path not in self.files})
        return changed

    async def write_files(self, files: Mapping[str, bytes | None]) -> dict[str, SandboxError]:
        for path, content in files.items():
            if content is None:
                self.files.pop(path, None)
            else:
                self.files[path] = content
        return {}

    async def close(self) -> None:
        self.is_lost = True
