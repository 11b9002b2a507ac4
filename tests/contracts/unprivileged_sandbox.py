"""What test_sandbox_unprivileged.py runs as a user without rights: one JSON line tells what happened.

Arguments: overlays or copies, folder that the user owns.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.host.backend import NamespaceBackend
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec

_EDITS = (
    "rm gone.txt; rm -r pack; mkdir pack; echo new > pack/b; echo x > plain; chmod 4777 plain; "
    "mkdir shut; echo in > shut/file; chmod 000 shut; echo secret > closed; chmod 000 closed"
)
_LOOK = "ls; ls pack; stat -c %a plain shut closed; chmod 700 shut; cat shut/file"
# files that are open in a folder which is closed then
_GROW_UNSEEN = (
    'import os, time; os.mkdir("d"); all = [open(f"d/{n}", "wb", 0) for n in range(40)]; os.chmod("d", 0); '
    "[one.write(bytes(1 << 20)) for one in all]; time.sleep(30)"
)


async def _end_of(sandbox: Sandbox, command: str) -> str:
    """The error that a command ends with; empty: none."""
    try:
        await sandbox.exec(command, 60)
    except SandboxError as error:
        return type(error).__name__
    return ""


async def use_backend(kind: str, folder: Path) -> dict:
    """Edit, snapshot, fork and limit, as the contract suite does with rights."""
    repository = folder / "repository"
    (repository / "pack").mkdir(parents=True)
    for name in ("gone.txt", "pack/a", "pack/b", "kept"):
        (repository / name).write_text(name)
    backend = NamespaceBackend(overlays=kind == "overlays")
    limits = SandboxLimits(processes=32, start_seconds=60.0, writable_bytes=32 << 20)
    sandbox = await backend.create(SandboxSpec(repository=repository, limits=limits))
    edited = await sandbox.exec(_EDITS, 60)
    changes = await sandbox.diff()
    snapshot = await sandbox.snapshot()
    child, other = await backend.fork(snapshot, 2)
    looked = await child.exec(_LOOK, 60)
    (grandchild,) = await backend.fork(child)
    bomb = await other.exec("bomb() { bomb | bomb & }; bomb; sleep 0.2; exit 3", 5)
    await other.exec("kill -9 -1", 5)
    usable = await other.exec("echo fine", 60)
    told = {
        "user": os.geteuid(),
        "capabilities": next(
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("CapEff")
        ),
        "edited": f"{edited.output.decode()}{edited.exit_code or ''}",
        "changes": {
            path: None if content is None else content.decode() for path, content in changes.items()
        },
        "looked": looked.output.decode(),
        "grandchild": (await grandchild.exec("ls pack; cat pack/b", 60)).output.decode(),
        "repository": sorted(path.name for path in repository.rglob("*")),
        "bomb": bomb.timed_out or bomb.exit_code != 0,
        "usable": usable.output.decode(),
    }
    told["grown"] = await _end_of(grandchild, f"python3 -c '{_GROW_UNSEEN}'")
    state = backend.store.directory
    await backend.close()
    told["left"] = state.exists()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(use_backend(sys.argv[1], Path(sys.argv[2])))))  # noqa: T201
