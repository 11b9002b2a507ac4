"""A box has ended when its processes have, and what it leaves is removed whatever they did last."""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import OutOfMemory, SandboxError
from ostinato.infra.sandbox.host.backend import NamespaceBackend, NamespaceSandbox
from ostinato.infra.sandbox.protocol import SandboxLimits, SandboxSpec
from ostinato.infra.sandbox.snapshots import layers, store
from ostinato.infra.sandbox.snapshots.layers import remove_folder
from ostinato.infra.sandbox.snapshots.store import discard_folder

ENDLESS = (
    "mkdir q; for n in 1 2 3; do setsid -f python3 -c 'import os, itertools\n"
    "for n in itertools.count():\n"
    '  os.close(os.open("q/%d-%d" % (os.getpid(), n), os.O_CREAT | os.O_WRONLY))\''
    " >/dev/null 2>&1 </dev/null; done; sleep 0.4"
)
LIMITS = SandboxLimits(memory_bytes=1 << 30)


def processes_of(box: NamespaceSandbox) -> list[str]:
    """Processes of this host in the box's process namespace."""
    assert box._box.process_id is not None
    own = Path(f"/proc/{box._box.process_id}/ns/pid").readlink()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "ns/pid").readlink() == own:
                found.append(entry.name)
    return found


def runs(process: str) -> bool:
    """Whether a process is there and no zombie, which the host's first process has yet to reap."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize("by_itself", [False, True], ids=["closed", "lost"])
def test_no_process_outlives_a_box_that_still_makes_files(by_itself: bool) -> None:
    async def run() -> None:
        backend = NamespaceBackend()
        try:
            for _ in range(4):
                box = await backend.create(SandboxSpec(limits=LIMITS))
                await box.exec(ENDLESS, 20.0)
                processes = processes_of(box)
                assert len(processes) >= 4
                if by_itself:
                    box._channel.lose(OutOfMemory("it wrote too much"))
                await box.close()
                assert not list(filter(runs, processes))
                assert not box.folder.exists()
            left = {path.name for path in backend.store.directory.iterdir()}
            assert left == {"empty"}
        finally:
            await backend.close()
        assert not backend.store.directory.exists()

    asyncio.run(run())


def test_a_box_that_is_given_up_before_it_was_made_leaves_no_process() -> None:
    async def run() -> None:
        backend = NamespaceBackend()
        mine = SandboxLimits(writable_bytes=(40 << 20) + os.getpid())  # told by its arguments
        for seconds in (0.0, 0.001, 0.005, 0.01, 0.02, 0.04):
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await backend.create(SandboxSpec(limits=mine))
        await backend.close()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                told = (entry / "cmdline").read_bytes()
                assert str(mine.writable_bytes).encode() not in told

    asyncio.run(run())


def test_what_cannot_be_removed_is_told_and_removed_with_the_next_box(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        backend = NamespaceBackend()
        first = await backend.create(SandboxSpec(limits=LIMITS))
        await first.exec("mkdir -p a/b/c && touch a/b/c/f d", 20.0)
        second = await backend.create(SandboxSpec(limits=LIMITS))

        def refuse(path: object, *rest: object, **named: object) -> None:
            raise OSError(39, "Directory not empty", str(path))

        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(layers.os, "rmdir", refuse)
            await first.close()
        assert str(first.folder) in caplog.text
        assert first.folder.exists()
        await second.close()
        left = {path.name for path in backend.store.directory.iterdir()}
        assert left == {"empty"}
        assert not store._left
        with monkeypatch.context() as patched:
            patched.setattr(layers.os, "rmdir", refuse)
            await backend.close()
        assert backend.store.directory.exists()
        await NamespaceBackend().close()
        assert not backend.store.directory.exists()

    asyncio.run(run())


def test_a_folder_of_any_shape_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = Path.cwd()
    try:
        os.chdir(top)
        for _ in range(800):
            Path("d" * 200).mkdir()
            os.chdir("d" * 200)
    finally:
        os.chdir(here)
    for index in range(3):
        (top / f"closed{index}" / "inner").mkdir(parents=True)
        (top / f"closed{index}" / "inner" / "file").touch(mode=0)
        (top / f"closed{index}" / "inner").chmod(0)
        (top / f"closed{index}").chmod(0)
    (top / ("n" * 255)).mkdir()
    (top / "ring").symlink_to(top / "ring")
    (top / "out").symlink_to(tmp_path)
    os.mkfifo(top / "pipe")
    remove_folder(top)
    discard_folder(top)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/tmp", "/run", "/dev/shm"])
@pytest.mark.sampled(1)
def test_empty_files_in_memory_count_against_the_box(folder: str) -> None:
    async def run() -> None:
        backend = NamespaceBackend()
        limits = SandboxLimits(writable_bytes=16 << 20)
        try:
            few, many = [await backend.create(SandboxSpec(limits=limits)) for _ in range(2)]
            make = f"cd {folder} && mkdir many && cd many && seq %d | xargs touch"
            await few.exec(make % 8_000, 20.0)
            with contextlib.suppress(OutOfMemory):  # it may come while the command runs
                await many.exec(make % 24_000, 20.0)
            for box in (few, many):
                await box.check_space()
            assert (few.is_lost, many.is_lost) == (False, True)
            with pytest.raises(OutOfMemory, match="entries in memory of"):
                await many.exec("true", 5.0)
        finally:
            await backend.close()

    asyncio.run(run())
