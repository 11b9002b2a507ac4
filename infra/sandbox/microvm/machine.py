"""One QEMU process: starts it, talks to its monitor, stops it, and copies its state.

It knows neither the agent's requests nor sandboxes.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Self

import psutil
from qemu.qmp import ExecuteError, QMPClient, QMPError

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError, SandboxLost
from ostinato.infra.sandbox.microvm.image import Image
from ostinato.infra.sandbox.microvm.memory import DirtyPages, read_dirty_pages, write_pages

PROGRAM = "qemu-system-x86_64"
_KERNEL_ARGUMENTS = (
    # Under load the guest cannot measure its clock against the timer chip and hangs; it is told.
    # It then takes the counter for good: against ticks lost under load every counter looks wrong.
    "tsc_early_khz={ticks_khz} tsc=reliable lpj=4000000 no_timer_check mitigations=off random.trust_cpu=on "
    "panic=-1 quiet"
)
_LAYOUT = 2  # raise it when `_describe` changes what a state holds
_MONITOR_SECONDS = 60.0
_STATE_SECONDS = 120.0
_POLL_SECONDS = 0.002


class Accelerator(StrEnum):
    """Executor of the guest's instructions: KVM, or translation (TCG)."""

    KVM = "kvm"
    TCG = "tcg"  # translation in software, some thirty times slower


@dataclass(frozen=True, slots=True)
class MachineShape:
    """Properties that a machine's states depend on; a state loads into the same shape only."""

    image: Image
    accelerator: Accelerator
    memory_bytes: int
    ticks_khz: int  # of the host's processor counter, which is the guest's clock


@dataclass(frozen=True, slots=True)
class MachineState:
    """State a machine starts from instead of booting. `memory_file` is the template's memory,
    shared by all; None: `devices_file` holds all memory.
    """

    memory_file: Path | None
    devices_file: Path
    pages: DirtyPages | None = None


class Machine:
    """A running QEMU. `socket` leads to the guest's agent. Belongs to one event loop."""

    def __init__(
        self,
        shape: MachineShape,
        process: "subprocess.Popen[bytes]",
        agent: socket.socket,
        control: socket.socket,
        messages: IO[bytes],
    ) -> None:
        self.shape = shape
        self.name = f"microvm-{process.pid}"
        self.process_id = process.pid
        self.socket = agent
        self.memory_file: Path | None = None  # mapped privately: what differs are its own pages
        self._process = process
        self._control_socket = control
        self._messages = messages
        self._client: QMPClient | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self.information_pipe = os.eventfd(1)  # ready: nothing is to be admitted

    @classmethod
    def boot(cls, shape: MachineShape, memory_file: Path) -> Self:
        """Start from the image with memory shared with a file, so that it can be a template."""
        return cls._start(shape, memory_file, is_shared=True)

    @classmethod
    async def begin(
        cls, shape: MachineShape, state: MachineState, *, is_shared: bool = False
    ) -> Self:
        """Start from a state; the guest goes on where it was.

        `is_shared`: it writes to the memory file itself, to become a template.
        """
        paused = ("-S",) if state.pages is not None or state.memory_file is None else ()
        options = (*paused, "-incoming", "defer")
        if state.pages is not None:
            options += ("-global", "migration.send-configuration=off")
        with state.devices_file.open("rb") as devices:
            machine = cls._start(
                shape,
                state.memory_file,
                is_shared=is_shared,
                options=options,
                inherited=(devices.fileno(),),
            )
            machine.memory_file = None if is_shared else state.memory_file
            try:
                await machine._load(state, devices.fileno())
            except BaseException:
                machine.close()
                raise
        return machine

    @classmethod
    def _start(
        cls,
        shape: MachineShape,
        memory_file: Path | None,
        *,
        is_shared: bool = False,
        options: tuple[str, ...] = (),
        inherited: tuple[int, ...] = (),
    ) -> Self:
        program = find_program()
        agent, agent_end = socket.socketpair()
        control, control_end = socket.socketpair()
        command = [
            program,
            *_describe(shape, memory_file, is_shared),
            *_connect(agent_end.fileno(), control_end.fileno()),
            *options,
        ]
        keeper = shutil.which("setpriv")  # ends QEMU when this process dies
        if keeper is not None:
            command = [keeper, "--pdeathsig", "KILL", "--", *command]
        messages = tempfile.TemporaryFile()  # noqa: SIM115 -- read when the machine has died
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                pass_fds=(agent_end.fileno(), control_end.fileno(), *inherited),
                start_new_session=True,
            )
        except OSError as error:
            for item in (agent, control, messages):
                item.close()
            raise CapacityExhausted(f"{PROGRAM} could not start: {error}") from error
        finally:
            agent_end.close()
            control_end.close()
        return cls(shape, process, agent, control, messages)

    @property
    def cpu_seconds(self) -> float:
        """Processor time this machine has used; 0 once it is gone."""
        try:
            times = psutil.Process(self.process_id).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    @property
    def demanded_seconds(self) -> float:
        """Processor time used and waited for: what stands still does not grow, however loaded."""
        total = 0
        for path in Path(f"/proc/{self.process_id}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                run, waited, _ = path.read_text().split()
                total += int(run) + int(waited)
        return 1e-9 * total

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def explain_death(self) -> SandboxError:
        """SandboxError with what is known about the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        code = self._process.returncode
        return SandboxLost(f"{self.name} ended with code {code}: {self._last_words()}")

    def admit(self) -> None:
        """A machine is limited by its own shape; there is nothing left to do."""
        self._close_information_pipe()

    async def pause(self) -> None:
        """Stop the guest's processor."""
        await self._run("stop")

    async def resume(self) -> None:
        """Let the guest go on."""
        await self._run("cont")

    async def save_template(self, devices_file: Path) -> None:
        """Save the devices of a running machine whose memory is shared with its file; it ends."""
        capability = {"capability": "x-ignore-shared", "state": True}
        await self._run("migrate-set-capabilities", {"capabilities": [capability]})
        await self._save(devices_file)
        self.close()

    async def copy_state(self, devices_file: Path) -> MachineState:
        """The state of a paused machine, to start others from; it stays paused.

        The short way takes the pages it has written and its devices. Where that is not possible
        (no right to look into the process, a QEMU without the command), all of it is saved.
        """
        if self.memory_file is not None:
            try:
                arguments = {"filename": str(devices_file), "live": False}
                await self._run("xen-save-devices-state", arguments)
                pages = read_dirty_pages(self.process_id, self.memory_file)
                return MachineState(self.memory_file, devices_file, pages)
            except (PermissionError, SandboxLost) as error:
                if not self.is_running:
                    raise
                del error
            except SandboxError:
                pass
        await self._save(devices_file)
        return MachineState(None, devices_file)

    def kill(self) -> None:
        """End the process at once; its socket then says so."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process; nothing of the guest is left."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        self._close_information_pipe()
        self.socket.close()
        self._messages.close()
        if self._client is None:
            self._control_socket.close()
        else:
            client, self._client = self._client, None
            task = asyncio.get_running_loop().create_task(_disconnect(client))
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    def _close_information_pipe(self) -> None:
        if self.information_pipe >= 0:
            os.close(self.information_pipe)
            self.information_pipe = -1

    async def _run(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        try:
            async with asyncio.timeout(_MONITOR_SECONDS):
                client = await self._connect()
                return await client.execute(command, dict(arguments or {}))
        except ExecuteError as error:
            raise SandboxError(f"{self.name} refused {command}: {error}") from error
        except (QMPError, OSError, TimeoutError, EOFError) as error:
            why = f"{self.name}: {command} failed: {type(error).__name__} {error}"
            raise SandboxLost(f"{why}; {self._last_words()}") from error

    async def _connect(self) -> QMPClient:
        async with self._connecting:
            if self._client is None:
                client = QMPClient(self.name)
                self._control_socket.setblocking(False)
                await client.connect(self._control_socket)
                self._client = client
            return self._client

    async def _save(self, path: Path) -> None:
        with path.open("wb") as file:
            (await self._connect()).send_fd_scm(file.fileno())
            await self._run("getfd", {"fdname": "state"})
            await self._run("migrate", {"uri": "fd:state"})
            await self._wait_migrated("migrate")

    async def _load(self, state: MachineState, descriptor: int) -> None:
        """Load and run. A template was running when it was saved, so it goes on by itself."""
        if state.pages is not None:
            assert state.memory_file is not None
            await self._run("query-status")  # answers once the memory is mapped
            write_pages(self.process_id, state.memory_file, state.pages)
        # Whoever saved the state had this set too: it is part of the format.
        ignored = {"capability": "x-ignore-shared", "state": True}
        await asyncio.gather(
            self._run("migrate-set-capabilities", {"capabilities": [ignored]}),
            self._run("migrate-incoming", {"uri": f"fd:{descriptor}"}),
        )
        if state.pages is not None or state.memory_file is None:
            await self._wait_migrated("migrate-incoming")
            await self._run("cont")

    async def _wait_migrated(self, command: str) -> None:
        deadline = asyncio.get_running_loop().time() + _STATE_SECONDS
        while True:
            answer = await self._run("query-migrate")
            status = answer.get("status", "none")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                why = answer.get("error-desc", "no reason given")
                raise SandboxLost(f"{self.name}: {command} {status}: {why}; {self._last_words()}")
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxLost(f"{self.name}: {command} is {status} after {_STATE_SECONDS} s")
            await asyncio.sleep(_POLL_SECONDS)

    def _last_words(self) -> str:
        if self._messages.closed:
            return "no message"
        return _read_end(self._messages.fileno()) or "no message"


def find_program() -> str:
    """Path of QEMU. SandboxError when it is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise SandboxError(
            f"{PROGRAM} is not installed, virtual machines need it; run "
            '`apt-get install qemu-system-x86`, or write sandbox = "namespace" in the recipe'
        )
    return program


def hash_program() -> str:
    """A key for this QEMU and this layout of machines: states load into the same ones only."""
    status = Path(find_program()).stat()
    text = f"{status.st_size} {status.st_mtime_ns} {_LAYOUT} {_KERNEL_ARGUMENTS}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_closing: set[asyncio.Task[None]] = set()


async def settle() -> None:
    """Wait until the monitors of closed machines are gone."""
    await asyncio.gather(*_closing)


async def _disconnect(client: QMPClient) -> None:
    with contextlib.suppress(QMPError, OSError, EOFError):
        await client.disconnect()


def _read_end(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 800, max(0, size - 800)).decode(errors="replace").strip()


def _describe(shape: MachineShape, memory_file: Path | None, is_shared: bool) -> list[str]:
    """Arguments of the machine, the same for a state's source and its copies."""
    memory = f"id=memory,size={shape.memory_bytes}"
    if memory_file is None:
        memory = f"memory-backend-ram,{memory}"
    else:
        share = "on" if is_shared else "off"
        memory = f"memory-backend-file,{memory},mem-path={memory_file},share={share}"
    command = [
        # Debian's kernel finds its devices through ACPI only.
        "-M", "microvm,acpi=on,rtc=on,memory-backend=memory",
        "-object", memory,
        "-m", f"{shape.memory_bytes >> 20}M",
        "-accel", shape.accelerator,
        "-cpu", "host" if shape.accelerator is Accelerator.KVM else "max",
        "-smp", "1",
        "-nodefaults", "-no-user-config", "-no-reboot",
        "-display", "none",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-kernel", str(shape.image.kernel),
        "-initrd", str(shape.image.initial),
        "-append", _KERNEL_ARGUMENTS.format(ticks_khz=shape.ticks_khz),
    ]  # fmt: skip
    if shape.image.disk is not None:
        drive = f"id=disk,format=raw,readonly=on,if=none,file={shape.image.disk}"
        command += ["-drive", drive, "-device", "virtio-blk-device,drive=disk"]
    return command


def _connect(agent: int, control: int) -> list[str]:
    return [
        "-chardev", f"socket,id=agent,fd={agent}",
        "-device", "virtio-serial-device",
        "-device", "virtserialport,chardev=agent,name=agent",
        "-chardev", f"socket,id=control,fd={control}",
        "-mon", "chardev=control,mode=control",
    ]  # fmt: skip
