"""Templates: machines that were booted once and frozen, from which all other machines start.

There is one per image, memory size and repository. Its memory is a file that all its copies share.
"""

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ostinato.infra.platform.errors import InvalidArgument, SandboxError, SandboxLost
from ostinato.infra.platform.folders import locked
from ostinato.infra.sandbox.host.tools import BoxTools
from ostinato.infra.sandbox.microvm.channel import MachineChannel
from ostinato.infra.sandbox.microvm.image import Image, ImageKind, build_image
from ostinato.infra.sandbox.microvm.machine import (
    Accelerator,
    Machine,
    MachineShape,
    MachineState,
    hash_program,
)
from ostinato.infra.sandbox.snapshots.layers import (
    Entries,
    EntryKind,
    identify_entries,
    read_entries,
)
from ostinato.infra.sandbox.snapshots.store import files_of, is_hidden

_TYPES = {
    EntryKind.FILE: tarfile.REGTYPE,
    EntryKind.FOLDER: tarfile.DIRTYPE,
    EntryKind.LINK: tarfile.SYMTYPE,
}

# Repeated measurements differ by far less. At 2 GHz, 10 kHz are 0.02 s per hour.
_ROUNDED_KHZ = 10
_MEASURE_SECONDS = 60.0

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ostinato-microvm-"
_MIN_MEMORY_BYTES = 128 << 20
_MEBIBYTE = 1 << 20
_FILL_SECONDS = 300.0
_WATCH_SECONDS = 0.05
_DEMAND_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class GuestRepository:
    """Files, folders and links of a repository, without caches and history."""

    key: str = ""  # hash of the content; empty: no repository
    entries: Entries = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """Regular files by path."""
        return files_of(self.entries)

    def pack(self) -> bytes:
        """The repository as a tar archive."""
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, entry in sorted(self.entries.items()):
                member = tarfile.TarInfo(path)
                member.type = _TYPES[entry.kind]
                member.mtime = entry.modified_ns // 1_000_000_000
                is_folder = entry.kind is EntryKind.FOLDER
                member.mode = entry.mode | (0o700 if is_folder else 0)  # so that it can be filled
                if entry.kind is EntryKind.LINK:
                    member.linkname = os.fsdecode(entry.content)
                    archive.addfile(member)
                else:
                    member.size = len(entry.content)
                    archive.addfile(member, io.BytesIO(entry.content))
        return target.getvalue()


@dataclass(frozen=True, slots=True)
class BootLimits:
    """Limits of one boot, and the number of attempts. Processor time distinguishes a hang from a loaded host: a
    guest that spins uses it up, and a guest that is stuck neither uses it nor waits for it.
    """

    cpu_seconds: float = 30.0
    idle_seconds: float = 20.0  # time in which the guest demanded less than 0.1 s of processor time
    wall_seconds: float = 600.0
    attempts: int = 3


KVM_PROBE = BootLimits(cpu_seconds=4.0, idle_seconds=5.0, wall_seconds=15.0, attempts=1)


@dataclass(frozen=True, slots=True)
class Template:
    """A frozen machine and the content of its repository."""

    shape: MachineShape
    state: MachineState
    repository: GuestRepository


class TemplateStore:
    """Templates on this host. Belongs to one event loop."""

    def __init__(
        self,
        image_folder: Path,
        *,
        accelerator: Accelerator | None = None,
        boot_limits: BootLimits | None = None,
    ) -> None:
        """`accelerator` None: KVM if a machine boots with it, else TCG."""
        self.boots: list[float] = []  # processor seconds of each successful boot
        self.num_failed_boots = 0
        self._image_folder = image_folder
        self._accelerator = accelerator
        self._boot_limits = boot_limits or BootLimits()
        memory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else image_folder
        memory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(memory)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
        self._making: dict[tuple[ImageKind, int, str], asyncio.Task[Template]] = {}
        self._repositories: dict[Path, GuestRepository] = {}

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator given, or found to work. None: nothing has booted yet."""
        return self._accelerator

    async def get(self, kind: ImageKind, memory_bytes: int, repository: Path | None) -> Template:
        """The template, created now if there is none. After a failure, the next call tries again."""
        size = max(_MIN_MEMORY_BYTES, -(-memory_bytes // _MEBIBYTE) * _MEBIBYTE)
        content = await self._read(repository)
        key = (kind, size, content.key)
        task = self._making.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            making = self._fill(key, content) if content.key else self._boot(kind, size)
            task = self._making[key] = asyncio.create_task(making)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Frees all memory. Machines that still run keep their mappings."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _boot(self, kind: ImageKind, memory_bytes: int) -> Template:
        image = await asyncio.to_thread(build_image, kind, self._image_folder)
        ticks_khz = await asyncio.to_thread(measure_ticks_khz, image, self._image_folder)
        for accelerator in self._candidates():
            shape = MachineShape(image, accelerator, memory_bytes, ticks_khz)
            cached = await asyncio.to_thread(self._load_cached, shape)
            if cached is not None:
                self._accelerator = accelerator
                return cached
            is_probe = accelerator is Accelerator.KVM and self._accelerator is None
            try:
                template = await self._boot_with_retries(
                    shape, KVM_PROBE if is_probe else self._boot_limits
                )
            except SandboxLost:
                if not is_probe:
                    raise
                _kvm_refusal(self._image_folder).touch()
                continue
            self._accelerator = accelerator
            await asyncio.to_thread(self._save_to_cache, template)
            return template
        raise SandboxError(f"image {image.key} boots with no accelerator")

    def _candidates(self) -> Iterator[Accelerator]:
        if self._accelerator is not None:
            yield self._accelerator
            return
        # An accessible device is no proof: on nested hosts a guest may still fail to boot.
        if (
            os.access("/dev/kvm", os.R_OK | os.W_OK)
            and not _kvm_refusal(self._image_folder).exists()
        ):
            yield Accelerator.KVM
        yield Accelerator.TCG

    def _save_to_cache(self, template: Template) -> None:
        """Saves a booted machine next to the images, for later processes on this host."""
        target = self._cache_folder(template.shape)
        with locked(target.parent / "lock"):
            for leftover in target.parent.glob("*.partial.*"):  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            if target.is_dir():  # another process was faster
                return
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial.", dir=target.parent))
            try:
                _copy_sparse(template.state.memory_file, partial / "memory")
                _copy_sparse(template.state.devices_file, partial / "devices")
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def _load_cached(self, shape: MachineShape) -> Template | None:
        source = self._cache_folder(shape)
        if not source.is_dir():
            return None
        state = self._state_for(shape)
        _copy_sparse(source / "memory", state.memory_file)
        _copy_sparse(source / "devices", state.devices_file)
        return Template(shape, state, GuestRepository())

    def _cache_folder(self, shape: MachineShape) -> Path:
        """Folder by shape and QEMU build, under KVM also by boot of the host: a state loads only with the same ones."""
        parts = [hash_program()]
        if shape.accelerator is Accelerator.KVM:
            parts.append(read_boot_id())
        return self._image_folder / "booted" / "-".join((_name_shape(shape), *parts))

    def _state_for(self, shape: MachineShape) -> MachineState:
        stem = self.folder / _name_shape(shape)
        return MachineState(stem.with_suffix(".memory"), stem.with_suffix(".devices"))

    async def _boot_with_retries(self, shape: MachineShape, limits: BootLimits) -> Template:
        for _ in range(limits.attempts - 1):
            with contextlib.suppress(SandboxLost):
                return await self._boot_once(shape, limits)
        return await self._boot_once(shape, limits)

    async def _boot_once(self, shape: MachineShape, limits: BootLimits) -> Template:
        state = self._state_for(shape)
        state.memory_file.unlink(missing_ok=True)
        machine = Machine.boot(shape, state.memory_file)
        channel = MachineChannel(machine)
        try:
            await _wait_for_hello(machine, channel, limits)
            self.boots.append(machine.cpu_seconds)
            await machine.save_template(state.devices_file)
        except SandboxLost:
            self.num_failed_boots += 1
            raise
        finally:
            await channel.close()
        return Template(shape, state, GuestRepository())

    async def _fill(self, key: tuple[ImageKind, int, str], repository: GuestRepository) -> Template:
        """A template with a repository: a copy of the template without one, filled and frozen."""
        base = await self.get(key[0], key[1], None)
        name = f"{base.state.memory_file.stem}-{key[2]}"
        memory_file = self.folder / f"{name}.memory"
        await asyncio.to_thread(_copy_sparse, base.state.memory_file, memory_file)
        state = MachineState(memory_file, base.state.devices_file)
        machine = await Machine.begin(base.shape, state, is_shared=True)
        channel = MachineChannel(machine)
        try:
            archive = await asyncio.to_thread(repository.pack)
            result = await BoxTools(channel).exec("tar -xpf -", _FILL_SECONDS, stdin=archive)
            if result.exit_code:
                raise SandboxError(f"the repository was not unpacked: {result.output[-800:]!r}")
            devices_file = self.folder / f"{name}.devices"
            await machine.save_template(devices_file)
        finally:
            await channel.close()
        return Template(base.shape, MachineState(memory_file, devices_file), repository)

    async def _read(self, folder: Path | None) -> GuestRepository:
        if folder is None:
            return GuestRepository()
        if folder not in self._repositories:
            if not folder.is_dir():
                raise InvalidArgument(f"repository {folder} is not a folder on this host")
            self._repositories[folder] = await asyncio.to_thread(read_repository, folder)
        return self._repositories[folder]


async def _wait_for_hello(machine: Machine, channel: MachineChannel, limits: BootLimits) -> None:
    """Waits until the agent answers. Raises SandboxLost at the first limit that is exceeded."""
    loop = asyncio.get_running_loop()
    started = marked_at = loop.time()
    marked_demand = 0.0
    hello = asyncio.create_task(channel.request("hello", limits.wall_seconds + 1.0))
    while not (await asyncio.wait({hello}, timeout=_WATCH_SECONDS))[0]:
        cpu, now = machine.cpu_seconds, loop.time()
        demand = machine.demanded_seconds
        if demand - marked_demand >= _DEMAND_SECONDS:
            marked_demand, marked_at = demand, now
        is_stuck = (
            cpu > limits.cpu_seconds
            or now - marked_at > limits.idle_seconds
            or now - started > limits.wall_seconds
        )
        if is_stuck:
            channel.lose(
                SandboxLost(
                    f"{machine.name}: no answer from the guest after {now - started:.1f} s and "
                    f"{cpu:.1f} s of processor time, idle for {now - marked_at:.1f} s; {limits}"
                )
            )
            break
    await hello


def _copy_sparse(source: Path, target: Path) -> None:
    """Copies a file without its holes, which are most of an idle guest's memory."""
    with source.open("rb") as reading, target.open("wb") as writing:
        size = os.fstat(reading.fileno()).st_size
        os.ftruncate(writing.fileno(), size)
        place = 0
        while place < size:
            try:
                place = os.lseek(reading.fileno(), place, os.SEEK_DATA)
            except OSError:  # only holes are left
                return
            end = os.lseek(reading.fileno(), place, os.SEEK_HOLE)
            os.lseek(writing.fileno(), place, os.SEEK_SET)
            while place < end:
                done = os.sendfile(writing.fileno(), reading.fileno(), place, end - place)
                place += done


def _kvm_refusal(image_folder: Path) -> Path:
    """A marker file that exists if no machine could boot under KVM since the host started."""
    return image_folder / f"no-kvm-{read_boot_id()}"


def _name_shape(shape: MachineShape) -> str:
    mebibytes = shape.memory_bytes >> 20
    return f"{shape.image.key}-{shape.accelerator}-{mebibytes}-{shape.ticks_khz}"


def _remove_leftovers(folder: Path) -> None:
    """Removes the memory files of killed processes."""
    for path in folder.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def read_boot_id() -> str:
    """The kernel's id of the present boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def measure_ticks_khz(image: Image, folder: Path) -> int:
    """Rate of the time stamp counter in kHz, cached in `folder` until the host restarts."""
    cached = folder / f"ticks-khz-{read_boot_id()}"
    if not cached.is_file():
        partial = cached.with_name(f"{cached.name}.partial.{os.getpid()}")
        partial.write_text(str(_measure(image.tick_rate)))
        partial.replace(cached)
    return int(cached.read_text())


def _measure(program: Path) -> int:
    answer = subprocess.run([program], capture_output=True, timeout=_MEASURE_SECONDS, text=True)
    if answer.returncode or not answer.stdout.strip().isdecimal() or not int(answer.stdout):
        raise SandboxError(
            f"{program} ended with {answer.returncode} and {answer.stdout!r}, wanted 0 and a "
            "number of kilohertz"
        )
    return round(int(answer.stdout) / _ROUNDED_KHZ) * _ROUNDED_KHZ


def read_repository(folder: Path) -> GuestRepository:
    """The repository in a folder of the host, without caches and history."""
    entries = {
        path: entry
        for path, entry in read_entries(folder).items()
        if not any(map(is_hidden, path.split("/")))
    }
    return GuestRepository(identify_entries(entries), entries)
