"""What an agent tries inside a virtual machine, with the shell alone, to get out or to break it."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.errors import InvalidArgument, SandboxError
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.microvm import Accelerator, MicroVmBackend
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from tests.contracts.sandbox_backends import Bench, running_bench

pytestmark = [pytest.mark.microvm, pytest.mark.timeout(600)]

SECONDS = 300.0  # a command takes milliseconds; the host may be loaded and the guest is translated
LIMITS = SandboxLimits(
    memory_bytes=256 << 20,
    processes=48,
    file_bytes=16 << 20,
    writable_bytes=32 << 20,
    start_seconds=SECONDS,
)
SPEC = SandboxSpec(template="small", limits=LIMITS)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    images = load_settings().cache_directory / "microvm"
    with running_bench(lambda: MicroVmBackend(images, accelerator=Accelerator.TCG)) as bench:
        yield bench


@pytest.fixture(scope="module")
def shared(bench) -> Sandbox:
    return bench.run(bench.backend.create(SPEC))


@pytest.fixture
def fresh(bench) -> Iterator[Sandbox]:
    sandbox = bench.run(bench.backend.create(SPEC))
    yield sandbox
    bench.run(sandbox.close())


def test_host_files_and_environment_are_not_there(bench, shared, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    look = f"cat {secret}; ls {tmp_path} {Path.home()} /home /var; find / -name secret.txt; env"
    seen = bench.run(shared.exec(f"exec 2>/dev/null; {look}", SECONDS)).output
    assert b"secret" not in seen
    assert os.environ["PATH"].encode() not in seen


def test_network_has_only_its_loopback(bench, shared):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    seen = bench.shell(
        shared,
        f"for place in '127.0.0.1 {port}' '1.1.1.1 53' '169.254.169.254 80'; do "
        "nc -w 3 $place < /dev/null && echo open; done; tail -n +3 /proc/net/dev | cut -d: -f1",
        SECONDS,
    )
    listener.close()
    assert b"open" not in seen
    assert seen.split()[-1] == b"lo"


def test_privileges_are_not_gained(bench, shared):
    tries = (
        "unshare --user true && echo userns; mount -t tmpfs none /tmp && echo mounted; "
        "chroot / true && echo chroot; mknod /tmp/vda b 254 0 && echo device; "
        "for path in /bin/x /etc/x /x /proc/sys/x /init /modules/x; do "
        "(echo x > $path) && echo wrote $path; done; cat /dev/vport0p1 && echo port; "
        "grep NoNewPrivs /proc/self/status; grep CapEff /proc/self/status; id -u"
    )
    seen = bench.run(shared.exec(f"exec 2>/dev/null; {tries}", SECONDS)).output.split()
    assert seen == [b"NoNewPrivs:", b"1", b"CapEff:", b"0000000000000000", b"1000"]


def test_agent_is_closed_to_inspection_and_signals(bench, shared):
    command = (
        "cat /proc/1/environ /proc/1/maps /proc/1/mem; ls -l /proc/1/fd/; "
        "kill -9 1; kill -15 1; kill -2 1; ls /proc/self/fd"
    )
    seen = bench.run(shared.exec(f"exec 2>/dev/null; {command}", SECONDS)).output
    assert seen.split() == [b"0", b"1", b"2", b"3"]  # 3 is the folder that ls reads
    assert bench.is_usable(shared, SECONDS)


def test_fork_bomb_is_stopped_and_the_box_goes_on(bench, fresh):
    bench.run(fresh.exec("bomb() { bomb | bomb & }; bomb; sleep 1", 10.0))
    bench.shell(fresh, "kill -9 -1", SECONDS)
    assert bench.is_usable(fresh, SECONDS)


def test_memory_hogs_end_and_the_box_goes_on(bench, fresh):
    hog = "for i in 1 2 3; do dd if=/dev/zero of=/dev/null bs=200M count=1 & done; wait"
    bench.run(fresh.exec(hog, SECONDS))
    one = bench.run(fresh.exec("exec dd if=/dev/zero of=/dev/null bs=700M count=1", SECONDS))
    assert one.exit_code != 0
    assert bench.is_usable(fresh, SECONDS)


def test_disk_files_and_scratch_space_are_limited(bench, fresh):
    write = "dd if=/dev/zero of={} bs=100000 count={} 2> /dev/null"
    assert bench.run(fresh.exec(write.format("big", 400), SECONDS)).exit_code
    fill = f"for i in 1 2 3 4 5; do {write.format('{}/$i', 90)} || exit 9; done"
    for folder in (".", "/tmp", "/dev/shm"):
        assert bench.run(fresh.exec(fill.format(folder), SECONDS)).exit_code == 9
        bench.shell(fresh, f"rm -f big {folder}/?", SECONDS)
    assert bench.is_usable(fresh, SECONDS)


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "/proc/1/environ",
        "/tmp/../etc/passwd",
        "out/passwd",
        "loop/loop/loop",
        "server/maps",
        "/init",
        "/dev/shm/../null",
    ],
)
def test_links_and_dots_lead_no_tool_outside(bench, shared, path):
    bench.shell(shared, "ln -sfn /etc out; ln -sfn loop loop; ln -sfn /proc/1 server", SECONDS)

    async def use_every_tool():
        outcomes = [
            *await shared.read_files([path]),
            *(await shared.write_files({path: b"escaped"})).values(),
            *(await shared.write_files({path: None})).values(),
        ]
        try:
            outcomes.append(await shared.list_files(path))
        except SandboxError as error:
            outcomes.append(error)
        return outcomes

    outcomes = bench.run(use_every_tool())
    assert [isinstance(item, SandboxError) for item in outcomes] == [True] * 4


def test_links_swapped_while_a_tool_reads_lead_nowhere(bench, fresh):
    bench.shell(fresh, "mkdir real; echo fine > real/maps", SECONDS)
    swap = "while :; do ln -sfn real turn; ln -sfn /proc/self turn; done"

    async def race():
        swapping = asyncio.create_task(fresh.exec(swap, 10.0))
        answers = []
        while not swapping.done():
            answers += await fresh.read_files(["turn/maps"] * 10)
        return answers

    answers = bench.run(race())
    assert {answer for answer in answers if isinstance(answer, bytes)} <= {b"fine\n"}


def test_output_floods_cost_bounded_memory(bench, shared):
    flood = "yes | head -c 4000000"
    result = bench.run(shared.exec(flood, SECONDS, output_cap_bytes=2000))
    assert result.truncated
    assert len(result.output) < 2200

    assert bench.is_usable(shared, SECONDS)


def test_daemons_end_with_the_machine_and_its_machine_with_the_sandbox(bench):
    sandbox = bench.run(bench.backend.create(SPEC))
    start = "setsid sh -c 'touch /tmp/up; exec sleep 4321' > /dev/null 2>&1 & "
    bench.shell(sandbox, start + "while [ ! -e /tmp/up ]; do sleep 0.01; done", SECONDS)
    assert b"4321" in bench.shell(sandbox, "cat /proc/[0-9]*/cmdline", SECONDS)
    process = sandbox.machine.process_id
    bench.run(sandbox.close())
    assert not psutil.pid_exists(process)


def test_answer_keys_are_out_of_reach(bench, tmp_path):
    repository = tmp_path / "project"
    (repository / "kit").mkdir(parents=True)
    (repository / "kit" / "work.py").write_text("def gone(): ...\n")
    for path in (
        "kit/__pycache__/work.cpython-311.pyc",
        ".git/objects/pack",
        ".mypy_cache/3.11/work.json",
        "kit.egg-info/SOURCES.txt",
        "kit/work.py.orig",
        ".venv/lib/work.py",
    ):
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(b"THE_ANSWER_42")
    spec = SPEC.model_copy(update={"repository": repository})
    sandbox = bench.run(bench.backend.create(spec))
    assert bench.shell(sandbox, "grep -r THE_ANSWER .; ls", SECONDS) == b"kit\n"
    assert bench.run(sandbox.diff()) == {}
    bench.run(sandbox.close())


def test_a_template_or_repository_that_is_not_there_is_refused(bench, tmp_path):
    for spec in (SandboxSpec(template="windows"), SandboxSpec(repository=tmp_path / "nowhere")):
        with pytest.raises(InvalidArgument):
            bench.run(bench.backend.create(spec))
