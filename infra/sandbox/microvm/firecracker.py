"""UNTESTED: the machine of this backend on Firecracker instead of QEMU, written against its API.

No host of ours runs it (it needs KVM), so only the requests it sends are tested, against a server
that records them. Firecracker's requests and how its snapshots serve the same verbs: a template is
a paused full snapshot, a copy maps its memory file privately, a branch is a differential snapshot
of a paused machine laid over a copy of its template's memory file. The guest's agent is reached
through a virtual socket, so an image for it needs the module vmw_vsock_virtio_transport, an agent
that listens on AGENT_PORT, and an uncompressed kernel. Clock, random pool and names are refreshed
by the agent, as on QEMU: Firecracker leaves them to the user too.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from ostinato.infra.platform.errors import SandboxError, SandboxLost

PROGRAM = "firecracker"
AGENT_PORT = 52
_GUEST_NUMBER = 3
_KERNEL_ARGUMENTS = "reboot=k panic=1 quiet random.trust_cpu=on"
_START_SECONDS = 10.0
_REQUEST_SECONDS = 60.0
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class FirecrackerShape:
    """What a machine is made of."""

    kernel: Path
    initial: Path
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class FirecrackerState:
    """Where a machine begins instead of booting: all its memory, and its devices."""

    memory_file: Path
    devices_file: Path


class FirecrackerApi:
    """Requests to one Firecracker process over its unix socket."""

    def __init__(self, api_socket: Path, name: str) -> None:
        self._name = name
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(api_socket)),
            base_url="http://localhost",
            timeout=_REQUEST_SECONDS,
        )

    async def boot(self, shape: FirecrackerShape, agent_socket: Path) -> None:
        """Describe a machine and start it; pages are tracked from the start."""
        mebibytes = shape.memory_bytes >> 20
        await self.put(
            "machine-config",
            {"vcpu_count": 1, "mem_size_mib": mebibytes, "track_dirty_pages": True},
        )
        await self.put(
            "boot-source",
            {
                "kernel_image_path": str(shape.kernel),
                "initrd_path": str(shape.initial),
                "boot_args": _KERNEL_ARGUMENTS,
            },
        )
        await self.put("vsock", {"guest_cid": _GUEST_NUMBER, "uds_path": str(agent_socket)})
        await self.put("entropy", {})
        await self.put("actions", {"action_type": "InstanceStart"})

    async def load(self, state: FirecrackerState, agent_socket: Path) -> None:
        """Begin in a state and run; memory comes privately from the file, page by page."""
        await self.put(
            "snapshot/load",
            {
                "snapshot_path": str(state.devices_file),
                "mem_backend": {"backend_type": "File", "backend_path": str(state.memory_file)},
                "track_dirty_pages": True,
                "resume_vm": True,
                "vsock_override": {"uds_path": str(agent_socket)},
            },
        )

    async def set_running(self, is_running: bool) -> None:
        """Let the guest go on, or stop it."""
        await self._send("PATCH", "vm", {"state": "Resumed" if is_running else "Paused"})

    async def save(self, state: FirecrackerState, *, is_whole: bool) -> None:
        """Write a paused machine's state; not whole: only pages written since it began."""
        await self.put(
            "snapshot/create",
            {
                "snapshot_type": "Full" if is_whole else "Diff",
                "snapshot_path": str(state.devices_file),
                "mem_file_path": str(state.memory_file),
            },
        )

    async def put(self, path: str, body: dict[str, Any]) -> None:
        """One PUT; SandboxError says what Firecracker has against it."""
        await self._send("PUT", path, body)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._client.aclose()

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._client.request(method, f"/{path}", json=body)
        except httpx.HTTPError as error:
            why = f"{self._name}: {method} {path} failed: {type(error).__name__} {error}"
            raise SandboxLost(why) from error
        if answer.is_error:
            raise SandboxError(
                f"{self._name} refused {method} {path} with {answer.status_code}: "
                f"{answer.text[:400]}"
            )


class FirecrackerMachine:
    """A running Firecracker with the verbs of `machine.Machine`. UNTESTED as a whole."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.name = f"firecracker-{process.pid}"
        self.process_id = process.pid
        self.folder = folder
        self.template: FirecrackerState | None = None
        self.api = FirecrackerApi(folder / "api", self.name)
        self._process = process

    @classmethod
    async def boot(cls, shape: FirecrackerShape) -> Self:
        """Start from a kernel and its initial file system."""
        machine = await cls._start()
        await machine.api.boot(shape, machine.folder / "agent")
        return machine

    @classmethod
    async def begin(cls, state: FirecrackerState) -> Self:
        """Start from a state; the guest goes on where it was."""
        machine = await cls._start()
        await machine.api.load(state, machine.folder / "agent")
        machine.template = state
        return machine

    @classmethod
    async def _start(cls) -> Self:
        program = shutil.which(PROGRAM)
        if program is None:
            raise SandboxError(f"{PROGRAM} is not installed; it is not packaged by Debian")
        folder = Path(tempfile.mkdtemp(prefix="firecracker-"))
        process = subprocess.Popen(
            [program, "--api-sock", str(folder / "api")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        machine = cls(process, folder)
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while not (folder / "api").exists():
            if process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                await machine.close()
                raise SandboxLost(f"{machine.name} opened no socket in {_START_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)
        return machine

    async def connect(self) -> socket.socket:
        """A connection to the agent in the guest, ready for frames."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await loop.sock_connect(connection, str(self.folder / "agent"))
                await loop.sock_sendall(connection, f"CONNECT {AGENT_PORT}\n".encode())
                answer = b""
                while not answer.endswith(b"\n"):
                    part = await loop.sock_recv(connection, 1)  # what follows belongs to the agent
                    if not part:
                        raise ConnectionResetError("closed before it was accepted")
                    answer += part
        except (OSError, TimeoutError) as error:
            connection.close()
            raise SandboxLost(f"{self.name}: no way to the guest's agent: {error}") from error
        if not answer.startswith(b"OK "):
            connection.close()
            raise SandboxLost(f"{self.name}: the guest's agent is not there: {answer!r}")
        return connection

    async def pause(self) -> None:
        """Stop the guest's processor."""
        await self.api.set_running(False)

    async def resume(self) -> None:
        """Let the guest go on."""
        await self.api.set_running(True)

    async def save_template(self, state: FirecrackerState) -> None:
        """Save all of a machine, and end it."""
        await self.pause()
        await self.api.save(state, is_whole=True)
        await self.close()

    async def copy_state(self, state: FirecrackerState) -> None:
        """The state of a paused machine, to start others from; it stays paused.

        A difference is written over a copy of the memory the machine began with: Firecracker writes
        only the pages that changed and leaves the rest of the file alone.
        """
        if self.template is None:
            await self.api.save(state, is_whole=True)
            return
        await asyncio.to_thread(shutil.copyfile, self.template.memory_file, state.memory_file)
        await self.api.save(state, is_whole=False)

    async def close(self) -> None:
        """End the process; nothing of the guest is left."""
        await self.api.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, 9)
        await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self.folder, ignore_errors=True)
