"""One QEMU process: starts it, stops it, and copies its state."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Self

import numpy
import psutil

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError, SandboxLost
from ostinato.infra.sandbox.microvm.image import Image
from ostinato.infra.sandbox.microvm.monitor import Monitor

PAGE_BYTES = 4096
_PRESENT = numpy.uint64(1 << 63)
_SWAPPED = numpy.uint64(1 << 62)
_SHARED_OR_FILE = numpy.uint64(1 << 61)
_MAX_RUN_PAGES = 1024

PROGRAM = "qemu-system-x86_64"
_KERNEL_ARGUMENTS = (
    # tsc_early_khz: on a loaded host the guest hangs when it measures its counter against the timer chip.
    # tsc=reliable: otherwise ticks lost under load make the guest reject the counter.
    "tsc_early_khz={ticks_khz} tsc=reliable lpj=4000000 no_timer_check mitigations=off random.trust_cpu=on "
    "panic=-1 quiet"
)
_LAYOUT = 2  # raise it when `_describe` changes the content of states


@dataclass(frozen=True, slots=True)
class DirtyPages:
    """Pages of a guest: their numbers and contents."""

    numbers: numpy.ndarray  # int64, rising
    content: bytearray


class Accelerator(StrEnum):
    """Executors of the guest's instructions."""

    KVM = "kvm"
    TCG = "tcg"  # translation in software, about thirty times slower


@dataclass(frozen=True, slots=True)
class MachineShape:
    """Properties on which a machine's states depend. A state loads only into a machine of the same shape."""

    image: Image
    accelerator: Accelerator
    memory_bytes: int
    ticks_khz: int  # rate of the host's time stamp counter, which is the guest's clock


@dataclass(frozen=True, slots=True)
class MachineState:
    """State from which a machine starts instead of booting."""

    memory_file: Path  # the template's memory, shared by all its copies
    devices_file: Path
    pages: DirtyPages | None = None  # that differ from the template; None: the template itself


class Machine:
    """A running QEMU process. `socket` is connected to the guest's agent. Belongs to one event loop."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        agent: socket.socket,
        control: socket.socket,
        messages: IO[bytes],
    ) -> None:
        self.name = f"microvm-{process.pid}"
        self.process_id = process.pid
        self.socket = agent
        self._process = process
        self._messages = messages
        self._monitor = Monitor(self.name, control, self._read_stderr)
        self._closed = False
        self.information_pipe = os.eventfd(1)  # readable at once: nothing to wait for

    @classmethod
    def boot(cls, shape: MachineShape, memory_file: Path) -> Self:
        """Boots the image with its memory shared with a file, so that the machine can become a template."""
        return cls._start(shape, memory_file, is_shared=True)

    @classmethod
    async def begin(
        cls, shape: MachineShape, state: MachineState, *, is_shared: bool = False
    ) -> Self:
        """Starts from a state. The guest continues where it was.

        `is_shared`: the machine writes to the memory file itself, to become a template.
        """
        options = ("-incoming", "defer")
        if state.pages is not None:
            options += ("-S", "-global", "migration.send-configuration=off")
        with state.devices_file.open("rb") as devices:
            machine = cls._start(
                shape,
                state.memory_file,
                is_shared=is_shared,
                options=options,
                inherited=(devices.fileno(),),
            )
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
        memory_file: Path,
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
        setpriv = shutil.which("setpriv")  # makes QEMU end when this process dies
        if setpriv is not None:
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
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
            raise CapacityExhausted(f"{PROGRAM} could not be started: {error}") from error
        finally:
            agent_end.close()
            control_end.close()
        return cls(process, agent, control, messages)

    @property
    def cpu_seconds(self) -> float:
        """Processor time that this machine has used. 0 once it has ended."""
        try:
            times = psutil.Process(self.process_id).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    @property
    def demanded_seconds(self) -> float:
        """Processor time that the machine used or waited for. It does not grow while the guest is idle, however
        loaded the host is.
        """
        total = 0
        for path in Path(f"/proc/{self.process_id}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                run, waited, _ = path.read_text().split()
                total += int(run) + int(waited)
        return 1e-9 * total

    def explain_death(self) -> SandboxError:
        """SandboxLost with the exit code and the end of stderr of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        code = self._process.returncode
        return SandboxLost(f"{self.name} ended with code {code}: {self._read_stderr()}")

    def admit(self) -> None:
        """Sets no limits, because the shape of a machine limits it."""
        self._close_information_pipe()

    async def pause(self) -> None:
        """Stops the guest's processor."""
        await self._monitor.run("stop")

    async def resume(self) -> None:
        """Lets the guest's processor run again."""
        await self._monitor.run("cont")

    async def save_template(self, devices_file: Path) -> None:
        """Saves the devices of a running machine whose memory is shared with its file, and ends the machine."""
        await self._monitor.ignore_shared_memory()
        await self._monitor.save(devices_file)
        self.close()

    async def copy_state(self, memory_file: Path, devices_file: Path) -> MachineState:
        """The state of a paused machine that started from this memory. The machine stays paused."""
        arguments = {"filename": str(devices_file), "live": False}
        await self._monitor.run("xen-save-devices-state", arguments)
        try:
            pages = read_dirty_pages(self.process_id, memory_file)
        except PermissionError as error:
            raise SandboxError(
                f"{self.name}: {error}; wanted permission to read the memory of a child process: run "
                "`sysctl -w kernel.yama.ptrace_scope=1`"
            ) from error
        return MachineState(memory_file, devices_file, pages)

    def kill(self) -> None:
        """Kills the process, which the reader of its socket notices."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def end(self) -> None:
        """Ends the process, in the event loop of its monitor."""
        self.close()

    def close(self) -> None:
        """Ends the process and closes its sockets and files."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        self._close_information_pipe()
        self.socket.close()
        self._messages.close()
        self._monitor.close()

    def _close_information_pipe(self) -> None:
        if self.information_pipe >= 0:
            os.close(self.information_pipe)
            self.information_pipe = -1

    async def _load(self, state: MachineState, descriptor: int) -> None:
        """Loads a state and runs it. A template was saved running, so it continues without a command."""
        if state.pages is not None:
            await self._monitor.run("query-status")  # answers once the memory is mapped
            write_pages(self.process_id, state.memory_file, state.pages)
        await asyncio.gather(
            self._monitor.ignore_shared_memory(),
            self._monitor.run("migrate-incoming", {"uri": f"fd:{descriptor}"}),
        )
        if state.pages is not None:
            await self._monitor.wait_migrated()
            await self._monitor.run("cont")

    def _read_stderr(self) -> str:
        if self._messages.closed:
            return "no message"
        return _read_end(self._messages.fileno()) or "no message"


def find_program() -> str:
    """Path of QEMU. Raises SandboxError if it is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise SandboxError(
            f"{PROGRAM} is not installed, virtual machines need it; run "
            '`apt-get install qemu-system-x86`, or write sandbox = "namespace" in the recipe'
        )
    return program


def hash_program() -> str:
    """A key of this QEMU and layout of machines. A state loads only under an equal key."""
    status = Path(find_program()).stat()
    text = f"{status.st_size} {status.st_mtime_ns} {_LAYOUT} {_KERNEL_ARGUMENTS}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read_end(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, 800, max(0, size - 800)).decode(errors="replace").strip()


def _describe(shape: MachineShape, memory_file: Path, is_shared: bool) -> list[str]:
    """Arguments of the machine, which are the same for the source of a state and its copies."""
    memory = f"memory-backend-file,id=memory,size={shape.memory_bytes},mem-path={memory_file}"
    command = [
        # Debian's kernel finds devices only through ACPI.
        "-M", "microvm,acpi=on,rtc=on,memory-backend=memory",
        "-object", f"{memory},share={'on' if is_shared else 'off'}",
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


def read_dirty_pages(process_id: int, memory_file: Path) -> DirtyPages:
    """The pages that a stopped machine has written since it mapped the file privately."""
    ranges = _find_mappings(process_id, memory_file)
    parts, runs = [], []
    with Path(f"/proc/{process_id}/pagemap").open("rb", buffering=0) as pagemap:
        for start, end, offset in ranges:
            count = (end - start) // PAGE_BYTES
            raw = os.pread(pagemap.fileno(), 8 * count, start // PAGE_BYTES * 8)
            flags = numpy.frombuffer(raw, dtype="<u8")
            private = (flags & (_PRESENT | _SWAPPED) != 0) & (flags & _SHARED_OR_FILE == 0)
            found = numpy.flatnonzero(private)
            parts.append(found + offset // PAGE_BYTES)
            runs += [(start + first * PAGE_BYTES, count) for first, count in _split_runs(found)]
    numbers = numpy.concatenate(parts) if parts else numpy.empty(0, dtype="<i8")
    content = bytearray(len(numbers) * PAGE_BYTES)
    view, place = memoryview(content), 0
    with Path(f"/proc/{process_id}/mem").open("rb", buffering=0) as memory:
        for address, count in runs:
            wanted = count * PAGE_BYTES
            got = os.preadv(memory.fileno(), [view[place : place + wanted]], address)
            if got != wanted:
                raise SandboxError(
                    f"process {process_id}: read {got} of {wanted} bytes at {address:#x}"
                )
            place += wanted
    order = numpy.argsort(numbers, kind="stable")
    if not numpy.array_equal(order, numpy.arange(len(order))):
        raise SandboxError(f"process {process_id}: guest memory is mapped out of order")
    return DirtyPages(numbers, content)


def write_pages(process_id: int, memory_file: Path, pages: DirtyPages) -> None:
    """Writes pages into the private mapping of a machine that has not run yet."""
    ranges = _find_mappings(process_id, memory_file)
    view = memoryview(pages.content)
    with Path(f"/proc/{process_id}/mem").open("r+b", buffering=0) as memory:
        place = 0
        for first, count in _split_runs(pages.numbers):
            wanted = count * PAGE_BYTES
            address = _address_of(ranges, first * PAGE_BYTES, wanted)
            done = os.pwritev(memory.fileno(), [view[place : place + wanted]], address)
            if done != wanted:
                raise SandboxError(
                    f"process {process_id}: wrote {done} of {wanted} bytes at {address:#x}"
                )
            place += wanted


def _find_mappings(process_id: int, memory_file: Path) -> list[tuple[int, int, int]]:
    """Start, end and file offset of each private mapping of the file, sorted by offset."""
    found = []
    status = memory_file.stat()
    wanted = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
        addresses, permissions, offset, device, inode, *_ = line.split()
        major, minor = (int(part, 16) for part in device.split(":"))
        if (major, minor, int(inode)) == wanted and permissions[3] == "p":
            start, end = (int(part, 16) for part in addresses.split("-"))
            found.append((start, end, int(offset, 16)))
    if not found:
        raise SandboxError(f"process {process_id} does not map {memory_file} privately")
    return sorted(found, key=lambda item: item[2])


def _split_runs(numbers: numpy.ndarray) -> list[tuple[int, int]]:
    """First page and length of each run of consecutive pages, of at most _MAX_RUN_PAGES."""
    if not len(numbers):
        return []
    breaks = numpy.flatnonzero(numpy.diff(numbers) != 1) + 1
    starts = numpy.concatenate(([0], breaks))
    lengths = numpy.diff(numpy.concatenate((starts, [len(numbers)])))
    runs = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for place in range(0, length, _MAX_RUN_PAGES):
            runs.append((int(numbers[start]) + place, min(_MAX_RUN_PAGES, length - place)))
    return runs


def _address_of(ranges: list[tuple[int, int, int]], offset: int, length: int) -> int:
    for start, end, first in ranges:
        if first <= offset and offset + length <= first + end - start:
            return start + offset - first
    raise SandboxError(f"no mapping holds bytes {offset} to {offset + length} of the guest")
