"""What only virtual machines can do: branch while they run, start anew after a hung boot."""

import asyncio
import time
from collections.abc import Iterator

import psutil
import pytest

from ostinato.infra.platform.errors import SandboxLost
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.microvm import Accelerator, BootLimits, MicroVmBackend
from ostinato.infra.sandbox.microvm.image import ImageKind, build_image
from ostinato.infra.sandbox.microvm.machine import PROGRAM
from ostinato.infra.sandbox.microvm.templates import TemplateStore
from ostinato.infra.sandbox.protocol import SandboxLimits, SandboxSpec, SnapshotKind
from ostinato.infra.sandbox.text_search import TextMatch, TextSearch, read_matches, search_command
from tests.fakes.processes import command_line

pytestmark = [pytest.mark.microvm, pytest.mark.timeout(600)]

IMAGES = load_settings().cache_directory / "microvm"
SECONDS = 300.0  # a command takes milliseconds; the host may be loaded and the guest is translated
LIMITS = SandboxLimits(memory_bytes=256 << 20, writable_bytes=32 << 20, start_seconds=SECONDS)
SPEC = SandboxSpec(template="small", limits=LIMITS)
LATE_SECONDS = 2.5  # well over the second in which a guest tells its time
COUNT = "n=0; while :; do n=$((n+1)); echo $n >> count; done"


def machines() -> list[psutil.Process]:
    """QEMU processes of this one."""
    children = psutil.Process().children()
    return [process for process in children if PROGRAM in command_line(process)]


@pytest.fixture(scope="module")
def backend(runner) -> Iterator[MicroVmBackend]:
    async def make() -> MicroVmBackend:
        return MicroVmBackend(IMAGES, accelerator=Accelerator.TCG)

    backend = runner.run(make())
    yield backend
    runner.run(backend.close())


@pytest.fixture
def source(runner, backend):
    sandbox = runner.run(backend.create(SPEC))
    yield sandbox
    runner.run(sandbox.close())


async def start_daemon(sandbox, command: str) -> None:
    """A process that outlives the command that started it."""
    ready = "while [ ! -e /tmp/up ]; do sleep 0.01; done"
    await sandbox.write("/tmp/daemon", b"touch /tmp/up\n" + command.encode())
    await sandbox.exec(f"setsid sh /tmp/daemon > /dev/null 2>&1 & {ready}", SECONDS)


async def wait_for_growth(sandbox) -> None:
    await sandbox.exec("while [ ! -e count ]; do sleep 0.01; done", SECONDS)
    start = await sandbox.read("count")
    while await sandbox.read("count") == start:
        await asyncio.sleep(0.01)


def test_branch_goes_on_in_both_and_shares_nothing_after(runner, backend, source):
    async def use():
        await source.write("before", b"both")
        await start_daemon(source, f"echo > count; {COUNT}")
        await wait_for_growth(source)
        (branch,) = await backend.fork(source)
        for sandbox in (source, branch):
            await wait_for_growth(sandbox)
        await source.write("left", b"")
        await branch.write("right", b"")
        names = await source.list(), await branch.list()
        counted = [(await item.read("count")).split()[:2] for item in (source, branch)]
        host_name = (await branch.exec("hostname", SECONDS)).output
        await branch.close()
        return names, counted, host_name, branch.sandbox_id

    names, counted, host_name, name = runner.run(use())
    assert names == (("before", "count", "left"), ("before", "count", "right"))
    assert counted[0] == counted[1]
    assert host_name == f"{name}\n".encode()
    # The pause grows with what is copied, and that is what the guest wrote, not what it has.
    assert 0 < source.copied_bytes < LIMITS.memory_bytes // 4


def test_a_command_under_way_ends_in_the_source_alone(runner, backend, source):
    """Whoever asked for it is not in the copy, whose requests have the same numbers."""

    async def use():
        command = "echo > started; while [ ! -e go ]; do sleep 0.01; done; echo end"
        waiting = asyncio.create_task(source.exec(command, SECONDS))
        while "started" not in await source.list():
            await asyncio.sleep(0.01)
        (branch,) = await backend.fork(source)
        await branch.write("go", b"")
        seen = [(await branch.exec(f"echo {number}", SECONDS)).output for number in range(20)]
        await source.write("go", b"")
        ended = (await waiting).output
        await branch.close()
        return seen, ended

    seen, ended = runner.run(use())
    assert seen == [f"{number}\n".encode() for number in range(20)]
    assert ended == b"end\n"


def test_random_numbers_and_clock_are_its_own_after_a_branch(runner, backend, source):
    async def use():
        branches = await backend.fork(source, 2)
        before = int(time.time())
        seen = [
            (await item.exec("cat /proc/sys/kernel/random/uuid; date +%s", SECONDS)).output.split()
            for item in (source, *branches)
        ]
        after = int(time.time())
        for item in branches:
            await item.close()
        return before, seen, after

    before, seen, after = runner.run(use())
    assert len({random for random, _ in seen}) == 3
    assert all(before - 1 <= int(clock) <= after + 1 for _, clock in seen)


async def read_uptime(sandbox) -> tuple[float, float, float]:
    """The guest's seconds since its boot, and the host's before and after they were read."""
    before = time.monotonic()
    seen = await sandbox.exec("cat /proc/uptime", SECONDS)
    return before, float(seen.output.split()[0]), time.monotonic()


async def read_clocks(*sandboxes) -> list[bool]:
    """Whether each guest's clock shows what the host's does, to a second."""
    right = []
    for sandbox in sandboxes:
        before = int(time.time())
        clock = int((await sandbox.exec("date +%s", SECONDS)).output)
        right.append(before - 1 <= clock <= int(time.time()) + 1)
    return right


def test_the_clock_of_a_guest_goes_as_fast_as_the_hosts(runner, source):
    async def use():
        first = later = await read_uptime(source)
        while later[1] < first[1] + 3.0:
            later = await read_uptime(source)
        return first, later

    first, later = runner.run(use())
    grown = later[1] - first[1]
    shortest, longest = later[0] - first[2], later[2] - first[0]
    assert shortest - 0.02 <= grown <= longest + 0.02  # it is told in hundredths


def test_the_clock_of_a_guest_is_the_processors_counter_and_stays_it(runner, source):
    """A counter that loses against lost timer ticks of a busy host would be given up for them."""

    async def use():
        folder = "/sys/devices/system/clocksource/clocksource0"
        clock = (await source.exec(f"cat {folder}/current_clocksource", SECONDS)).output
        return clock, (await source.exec("cat /proc/cmdline", SECONDS)).output.split()

    clock, parameters = runner.run(use())
    assert clock == b"tsc\n"
    assert b"tsc=reliable" in parameters


def test_clocks_are_right_after_a_branch_of_a_machine_that_stood_still(runner, backend, source):
    async def use():
        await source.machine.pause()
        await asyncio.sleep(LATE_SECONDS)
        await source.machine.resume()
        (branch,) = await backend.fork(source)
        right = await read_clocks(source, branch)
        await branch.close()
        return right

    assert runner.run(use()) == [True, True]


def test_the_clock_is_right_though_the_host_was_slow_to_start_the_machine(runner, backend):
    """The process stands still from the moment it is to be told the time."""

    async def use():
        known = set(machines())
        creating = asyncio.create_task(backend.create(SPEC))
        while not (started := set(machines()) - known):
            await asyncio.sleep(0)
        process = started.pop()
        process.suspend()
        await asyncio.sleep(LATE_SECONDS)
        process.resume()
        sandbox = await creating
        right = await read_clocks(sandbox)
        await sandbox.close()
        return right

    assert runner.run(use()) == [True]


def test_changes_are_of_one_moment_while_a_process_writes(runner, source):
    """Files are written in turn, so in no moment do their numbers differ by more than one."""
    names = [str(i) for i in range(10, 50)]
    each = f"for i in {' '.join(names)}; do"
    # What lies between makes a look at them long enough for the process to have its turn.
    begin = f"{each} echo 1 > $i; head -c 100000 /dev/zero > between$i; done"
    write = f"n=1; while :; do n=$((n+1)); {each} echo $n > $i; done; done"

    async def use():
        await source.exec(begin, SECONDS)
        await start_daemon(source, write)
        while await source.read("49") in (b"1\n", b""):
            await asyncio.sleep(0.01)
        return [await source.diff() for _ in range(5)]

    for changes in runner.run(use()):
        numbers = [int(changes[name] or b"0") for name in names]
        written = [number for number in numbers if number]  # one may just be empty
        assert written == sorted(written, reverse=True)
        assert written[0] - written[-1] <= 1


def test_memory_snapshot_brings_processes_back_after_their_machine_is_gone(runner, backend):
    async def use():
        sandbox = await backend.create(SPEC)
        await start_daemon(sandbox, f"echo > count; {COUNT}")
        await wait_for_growth(sandbox)
        snapshot = await sandbox.snapshot(SnapshotKind.MEMORY)
        await sandbox.close()
        copies = await backend.fork(snapshot, 2)
        for item in copies:
            await wait_for_growth(item)
        changed = set(await copies[0].diff())
        for item in copies:
            await item.close()
        await backend.remove_snapshot(snapshot)
        return changed

    assert runner.run(use()) == {"count"}


def test_file_snapshot_brings_files_back_as_they_were_and_no_process(runner, backend, source):
    async def use():
        await source.exec("mkdir empty; ln -s gone link; touch run; chmod +x run", SECONDS)
        await start_daemon(source, f"echo > count; {COUNT}")
        await wait_for_growth(source)
        snapshot = await source.snapshot(SnapshotKind.FILES)
        (copy,) = await backend.fork(snapshot)
        before = await copy.read("count")
        seen = await copy.exec("echo * /tmp/*; test -x run && readlink link", SECONDS)
        same = before == await copy.read("count")
        difference = await copy.diff(snapshot)
        await copy.close()
        return seen.output.split(), same, difference

    seen, same, difference = runner.run(use())
    assert seen == b"count empty link run /tmp/* gone".split()
    assert (same, difference) == (True, {})


def test_no_process_goes_on_for_a_moment_in_copies_of_a_file_snapshot(runner, backend, source):
    """Copies that start side by side give the ones they are to end the most time."""

    async def use():
        await start_daemon(source, f"echo > count; {COUNT}")
        await wait_for_growth(source)
        snapshot = await source.snapshot(SnapshotKind.FILES)
        copies = await backend.fork(snapshot, 8)
        differences = [await copy.diff(snapshot) for copy in copies]
        for copy in copies:
            await copy.close()
        return differences

    assert runner.run(use()) == [{}] * 8


def test_machine_that_dies_is_lost_and_says_so(runner, backend):
    async def use():
        sandbox = await backend.create(SPEC)
        job = asyncio.create_task(sandbox.exec("while :; do :; done", SECONDS))
        await sandbox.list()
        psutil.Process(sandbox.machine.process_id).kill()
        with pytest.raises(SandboxLost, match="ended with code -9"):
            await job
        assert sandbox.is_lost
        await sandbox.close()

    runner.run(use())


def test_hung_boot_is_ended_and_tried_again(runner, tmp_path):
    """The first machine is stopped while it boots: it then neither answers nor asks for time."""
    image = build_image(ImageKind.SMALL, IMAGES)
    (tmp_path / image.key).symlink_to(image.kernel.parent)
    limits = BootLimits(idle_seconds=3.0, attempts=2)

    known = machines()

    async def stop_first() -> int:
        while not (started := [process for process in machines() if process not in known]):
            await asyncio.sleep(0.1)
        started[0].suspend()
        return started[0].pid

    async def use():
        store = TemplateStore(tmp_path, accelerator=Accelerator.TCG, boot_limits=limits)
        stopping = asyncio.create_task(stop_first())
        try:
            template = await store.get(ImageKind.SMALL, 128 << 20, None)
            return (
                store.num_failed_boots,
                len(store.boots),
                template,
                psutil.pid_exists(await stopping),
            )
        finally:
            await store.close()

    failed, booted, template, is_left = runner.run(use())
    assert (failed, booted) == (1, 1)
    assert template.shape.memory_bytes == 128 << 20
    assert not is_left


def test_a_guest_that_only_spins_is_ended_by_its_processor_time(runner, tmp_path):
    image = build_image(ImageKind.SMALL, IMAGES)
    (tmp_path / image.key).symlink_to(image.kernel.parent)
    limits = BootLimits(cpu_seconds=0.3, attempts=1)

    async def use():
        store = TemplateStore(tmp_path, accelerator=Accelerator.TCG, boot_limits=limits)
        try:
            await store.get(ImageKind.SMALL, 128 << 20, None)
        finally:
            await store.close()

    with pytest.raises(SandboxLost, match="no answer from the guest"):
        runner.run(use())


def test_the_guest_has_ripgrep_and_finds_what_boxes_find(runner, source):
    async def use():
        await source.write("pkg/a.py", b"def first():\n    pass\n")
        await source.write("pkg/b.md", b"first\n")
        search = search_command(TextSearch(r"\bfirst\b", glob="*.py"))
        result = await source.exec(search, SECONDS)
        return result.exit_code, read_matches(result.output)

    assert runner.run(use()) == (0, ([TextMatch("pkg/a.py", 1, "def first():")], ""))


def test_the_python_image_has_python_and_git(runner, backend):
    async def use():
        limits = LIMITS.model_copy(update={"memory_bytes": 384 << 20})
        sandbox = await backend.create(SandboxSpec(limits=limits))
        await sandbox.write(
            "twice.py", b"import json, sys\nprint(json.dumps(2 * int(sys.argv[1])))\n"
        )
        results = [
            await sandbox.exec(command, SECONDS)
            for command in (
                "python3 twice.py 21",
                "git init -q . && git add twice.py && git status --short",
                "rg -l json twice.py; touch /usr/new /etc/new || echo closed",
            )
        ]
        (branch,) = await backend.fork(sandbox)
        results.append(await branch.exec("python3 twice.py 4", SECONDS))
        for item in (sandbox, branch):
            await item.close()
        return [result.output for result in results]

    number, status, found, again = runner.run(use())
    assert (number, again) == (b"42\n", b"8\n")
    assert status == b"A  twice.py\n"
    assert found.startswith(b"twice.py\n")
    assert found.endswith(b"closed\n")
