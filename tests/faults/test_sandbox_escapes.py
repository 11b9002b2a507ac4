"""What an agent tries in order to get out of its sandbox, to break it, or to find the answer."""

import asyncio
import contextlib
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import InvalidArgument, OutOfMemory, SandboxError, is_retryable
from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.protocol import SandboxSpec, TestOutcome
from ostinato.infra.sandbox.test_server import TestServer
from tests.contracts.fleet_backend import FleetBackend
from tests.contracts.sandbox_backends import (
    BACKENDS,
    COMMAND_SECONDS,
    LIMITS,
    Bench,
    box_fixtures,
    running_bench,
)
from tests.fakes.repositories import WORDKIT, open_repository

pytest_plugins = ["tests.fakes.ray_here"]

# Distributions that other projects vendor, and that problems are made from.
PACKAGES = (
    *("more_itertools", "jaraco", "tomli", "pyparsing", "packaging", "rich", "requests", "urllib3"),
    *("attr", "jinja2", "toolz", "networkx", "sympy", "numpy", "yaml", "click", "marshmallow"),
    *("sortedcontainers", "setuptools", "pip"),
)


# Machines have no Python in their small image; tests/faults/test_microvm_escapes.py tries them.
HERE = [name for name in BACKENDS if name != "microvm"]
FLEET = pytest.param("fleet", marks=(pytest.mark.slow, pytest.mark.timeout(600)))


@pytest.fixture(scope="module", params=[*HERE, FLEET])
def bench(request) -> Iterator[Bench]:
    """`fleet`: boxes that a node of a real fleet lends, asked over Ray."""
    if request.param == "fleet":
        request.getfixturevalue("ray_here")
    with running_bench(BACKENDS.get(request.param, FleetBackend)) as bench:
        yield bench


shared, fresh = box_fixtures()


def test_host_files_are_not_there(bench, shared, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    looked = f"exec 2>/dev/null; cat {secret}; ls {tmp_path} {Path.home()} /root /home /var /work /mnt /opt /srv; "
    looked += "cat /etc/passwd /etc/shadow /etc/hostname; find / -name secret.txt"
    seen = bench.run(shared.exec(looked, COMMAND_SECONDS)).output
    assert seen.replace(b"/opt:\npython\n", b"").strip() == b""


def test_environment_of_the_host_is_not_there(bench, shared, monkeypatch):
    monkeypatch.setenv("HOST_TOKEN", "t0ken")
    sandbox = bench.create()
    assert b"t0ken" not in bench.shell(sandbox, "env; cat /proc/*/environ 2>/dev/null")
    bench.run(sandbox.close())


def test_system_is_read_only(bench, shared):
    tries = ["/usr/bin/x", "/opt/python/lib/x", "/sandbox/site/x", "/etc/x", "/x", "/proc/sys/x"]
    tries += ["/dev/x", "/bin", "/opt/x", "/dev/pts/x"]
    command = "; ".join(f"(echo x > {path}) 2>/dev/null && echo wrote {path}" for path in tries)
    assert bench.shell(shared, command) == b""
    assert bench.shell(shared, "rm /bin 2>/dev/null; ls -d /bin") == b"/bin\n"
    assert bench.shell(shared, "mount -o remount,rw /usr && echo again") != b"again\n"


def test_network_does_not_leave_the_box(bench, shared):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    script = (
        "import socket\n"
        f"for place in (('127.0.0.1', {port}), ('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
        "    try: socket.create_connection(place, timeout=3); print('open', place)\n"
        "    except OSError: print('closed')\n"
        "for family in (socket.AF_PACKET, socket.AF_NETLINK):\n"
        "    try: socket.socket(family, socket.SOCK_RAW); print('raw', family)\n"
        "    except OSError: print('closed')\n"
    )
    bench.run(shared.write("/tmp/net.py", script.encode()))
    seen = bench.shell(shared, "python3 /tmp/net.py; cat /proc/net/dev | tail -n +3")
    listener.close()
    assert b"open" not in seen
    assert b"AF_PACKET" not in seen
    assert seen.splitlines()[-1].strip().startswith(b"lo:")


def test_abstract_sockets_of_the_host_are_not_reached(bench, shared):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0ostinato-escape-test")
    listener.listen()
    script = (
        "import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0ostinato-escape-test')\n"
        "except OSError: print('closed')\n"
    )
    assert (
        bench.run(shared.exec(f"python3 -c {shlex.quote(script)}", COMMAND_SECONDS)).output
        == b"closed\n"
    )
    listener.close()


def test_fork_bomb_is_stopped_and_the_box_goes_on(bench, fresh):
    bench.run(fresh.exec("bomb() { bomb | bomb & }; bomb; sleep 0.3", 3.0))
    bench.shell(fresh, "kill -9 -1")  # the bomb's own user may end it; process 1 stays
    assert bench.is_usable(fresh)
    assert int(bench.shell(fresh, "ls -d /proc/[0-9]* 2>/dev/null | wc -l")) <= LIMITS.processes


def test_memory_hogs_end_and_the_box_goes_on(bench, fresh):
    hog = "x = []\nwhile True: x.append(bytearray(8 << 20))"
    result = bench.run(fresh.exec(f"python3 -c {shlex.quote(hog)}", COMMAND_SECONDS))
    assert result.exit_code != 0
    many = f"for i in 1 2 3 4 5 6; do python3 -c '{hog.replace(chr(10), chr(10))}' & done; wait"
    bench.run(fresh.exec(many, COMMAND_SECONDS))
    assert bench.is_usable(fresh)


def test_memory_of_sockets_counts(bench, fresh):
    fill = (
        "import socket\n"
        "server, held, sent = socket.create_server(('127.0.0.1', 0)), [], 0\n"
        "try:\n"
        "    while len(held) < 1000 and sent < 1 << 30:\n"
        "        held.append(socket.create_connection(server.getsockname(), timeout=5))\n"
        "        held += [server.accept()[0]]\n"
        "        held[-2].setblocking(False)\n"
        "        try:\n"
        "            while True: sent += held[-2].send(bytes(1 << 16))\n"
        "        except BlockingIOError: pass\n"
        "except OSError: pass\n"
        "print(sent)\n"
    )
    groups = bench.shell(fresh, "cat /proc/self/cgroup")
    result = bench.run(fresh.exec(f"python3 -c {shlex.quote(fill)}", COMMAND_SECONDS))
    sent = int(result.output or 0)  # none where the kernel ended it
    assert sent < 2 * LIMITS.memory_bytes or b"ostinato" not in groups  # who may make no group
    assert bench.is_usable(fresh)


@pytest.mark.sampled(1)
def test_disk_fill_ends_the_box_that_fills_and_is_its_own_fault(bench):
    sandbox = bench.create()
    fill = "while :; do n=$((n+1)); head -c 4000000 /dev/zero > fill$n || exit 9; sleep 0.01; done"

    async def fill_again_and_again():
        while True:  # a command that the kernel ends for memory is a result; the box ends soon
            await sandbox.exec(fill, COMMAND_SECONDS)

    for _ in range(2):  # whoever asks later is told the same
        with pytest.raises(OutOfMemory) as caught:
            bench.run(fill_again_and_again())
        assert not is_retryable(caught.value)
        assert sandbox.is_lost
    bench.run(sandbox.close())


@pytest.mark.sampled(1)
def test_empty_files_fill_the_disk_too(bench):
    sandbox = bench.create()
    make = "import os, time\nfor n in range(40_000): os.close(os.open(f'f{n}', os.O_CREAT))\ntime.sleep(30)"
    with pytest.raises(OutOfMemory):
        bench.run(sandbox.exec(f"python3 -c {shlex.quote(make)}", COMMAND_SECONDS))
    bench.run(sandbox.close())


def test_files_of_holes_are_a_typed_failure_and_not_read(bench, fresh):
    bench.shell(fresh, "for n in 1 2 3; do truncate -s 14M hole$n; done")
    with pytest.raises(InvalidArgument, match="bytes"):
        bench.run(fresh.diff())
    bench.shell(fresh, "rm hole?")
    assert bench.run(fresh.diff()) == {}


def test_one_file_and_scratch_space_are_limited(bench, shared):
    assert bench.run(shared.exec("head -c 40000000 /dev/zero > big", COMMAND_SECONDS)).exit_code
    fill = "for i in 1 2 3 4 5; do head -c 9000000 /dev/zero > {}/$i || exit 9; done"
    for folder in ("/tmp", "/dev/shm"):
        result = bench.run(shared.exec(fill.format(folder), COMMAND_SECONDS))
        assert result.exit_code == 9
    bench.shell(shared, "rm -f big /tmp/? /dev/shm/?")


def test_server_is_closed_to_inspection_and_signals(bench, shared):
    script = (
        "import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        "print(library.ptrace(16, 1, 0, 0), ctypes.get_errno())\n"
        "try: open('/proc/1/mem', 'r+b'); print('opened')\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    seen = bench.run(shared.exec(f"python3 -c {shlex.quote(script)}", COMMAND_SECONDS)).output
    assert seen.splitlines()[0].startswith(b"-1")
    assert b"opened" not in seen
    command = (
        "cat /proc/1/environ /proc/1/maps; ls -l /proc/1/fd/; kill -9 1; kill -15 1; kill -2 1"
    )
    assert bench.run(shared.exec(command, COMMAND_SECONDS)).exit_code is not None
    assert b"socket" not in bench.shell(shared, "ls -l /proc/1/fd/ /proc/self/fd/")
    assert bench.is_usable(shared)


def test_control_channel_is_not_inherited(bench, shared):
    script = (
        "import os\nfor n in range(3, 256):\n try: os.fstat(n); print(n)\n except OSError: pass"
    )
    assert (
        bench.run(shared.exec(f"python3 -c {shlex.quote(script)}", COMMAND_SECONDS)).output == b""
    )


def test_privileges_are_not_gained(bench, shared):
    command = (
        "exec 2>/dev/null; unshare --user true && echo userns; unshare --net true && echo netns; "
        "mount -t tmpfs none /tmp && echo mounted; chroot / true && echo chroot; "
        "mknod /tmp/sda b 8 0 && echo device; grep -c . /proc/kallsyms > /dev/null; "
        "grep NoNewPrivs /proc/self/status; grep CapEff /proc/self/status; id -u"
    )
    seen = bench.run(shared.exec(command, COMMAND_SECONDS)).output.split()
    assert seen == [b"NoNewPrivs:", b"1", b"CapEff:", b"0000000000000000", b"1000"]


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "/proc/1/environ",
        "/proc/self/maps",
        "/tmp/../etc/ld.so.cache",
        "/opt/python/bin/python3",
        "out/python/bin/python3",
        "loop/loop/loop",
        "server/maps",
        "/dev/shm/../null",
        "wordkit/../../sandbox/site/pytest/__init__.py",
    ],
)
def test_links_and_dots_lead_no_tool_outside(bench, shared, path):
    bench.shell(
        shared, "ln -sfn /opt out; ln -sfn loop loop; ln -sfn /proc/1 server; ln -sfn /proc/self me"
    )

    async def use_every_tool():
        outcomes = [
            (await shared.write_files({path: b"escaped"})).get(path),
            (await shared.write_files({path: None})).get(path),
        ]
        for tool in (shared.read, shared.list):
            try:
                outcomes.append(await tool(path))
            except SandboxError as error:
                outcomes.append(error)
        return outcomes

    assert all(isinstance(outcome, SandboxError) for outcome in bench.run(use_every_tool()))


def test_links_swapped_while_a_tool_reads_lead_nowhere(bench, fresh):
    bench.shell(fresh, "mkdir real trap; echo fine > real/maps; ln -s /proc/1 trap/fake")
    swap = "while :; do ln -sfn real turn; ln -sfn /proc/self turn; done"

    async def race():
        swapping = asyncio.create_task(fresh.exec(swap, COMMAND_SECONDS))
        answers = []
        for _ in range(200):
            with contextlib.suppress(SandboxError):
                answers.append(await fresh.read("turn/maps"))
        await fresh.exec("kill -9 -1", COMMAND_SECONDS)
        await swapping
        return answers

    answers = bench.run(race())
    assert set(answers) <= {b"fine\n"}


def test_snapshots_do_not_follow_what_the_box_planted(bench, fresh, tmp_path):
    (tmp_path / "secret").write_text("host secret")
    bench.shell(
        fresh,
        f"ln -s {tmp_path}/secret stolen; ln -s {tmp_path} folder; mkfifo pipe; "
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\"; "
        "echo x > closed; chmod 000 closed; mkdir shut; echo y > shut/in; chmod 000 shut",
    )
    changes = bench.run(fresh.diff())
    assert changes == {"closed": b"x\n", "shut/in": b"y\n"}
    if isinstance(bench.backend, FleetBackend):
        with pytest.raises(InvalidArgument, match="a fleet keeps none"):
            bench.run(fresh.snapshot())
        return
    (child,) = bench.run(bench.backend.fork(fresh))
    assert bench.shell(
        child, "readlink stolen; cat stolen 2>/dev/null; stat -c %a closed shut"
    ) == (f"{tmp_path}/secret\n0\n0\n".encode())
    bench.run(child.close())


def is_running(argument: str) -> bool:
    """Whether a process of this machine has such an argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def test_daemons_end_with_the_box(bench):
    sandbox = bench.create()
    mark = f"98{os.getpid()}"
    bench.shell(
        sandbox,
        f"setsid nohup sh -c 'trap \"\" TERM HUP INT; sleep {mark}' > /dev/null 2>&1 & "
        # what has no session of its own when the command ends is ended with it
        f"(setsid sleep {mark} &); "
        # setsid has the number among its arguments too, before it becomes sleep
        f"until [ $(for one in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $one; echo; done 2> /dev/null"
        f" | grep -xc 'sleep {mark} ') -ge 2 ]; do :; done",
    )
    assert bench.shell(sandbox, "cat /proc/*/cmdline").count(mark.encode()) >= 3
    bench.run(sandbox.close())
    while is_running(mark):
        bench.run(asyncio.sleep(0.05))


def test_daemon_that_holds_the_output_delays_no_answer(bench, shared):
    result = bench.run(shared.exec("setsid sleep 300 & echo started", COMMAND_SECONDS))
    assert (result.output, result.timed_out) == (b"started\n", False)


def test_output_floods_cost_bounded_memory(bench, shared):
    flood = "yes | head -c 100000000; yes | head -c 100000000 >&2"
    result = bench.run(shared.exec(flood, COMMAND_SECONDS, output_cap_bytes=2000))
    assert result.truncated
    assert len(result.output) < 2200
    assert bench.is_usable(shared)


def test_flood_from_a_daemon_ends_with_its_command(bench, shared):
    result = bench.run(
        shared.exec("setsid yes & echo begun", COMMAND_SECONDS, output_cap_bytes=2000)
    )
    assert result.output.startswith((b"begun", b"y\n"))
    assert result.wall_seconds < COMMAND_SECONDS
    bench.shell(shared, "pkill yes")
    assert bench.is_usable(shared)


@pytest.mark.sampled(1)
def test_folders_deeper_than_a_path_can_be_end_their_own_box_alone(bench, fresh):
    deep = "import os\nfor n in range(1500):\n os.mkdir('d' * 9)\n os.chdir('d' * 9)"
    other = bench.create()

    async def deepen_and_compare() -> (
        None
    ):  # the disk watch may end the box before the command does
        await fresh.exec(f"python3 -c {shlex.quote(deep)}", COMMAND_SECONDS)
        await fresh.diff()

    with pytest.raises(SandboxError):
        bench.run(deepen_and_compare())
    assert bench.is_usable(other)
    bench.run(other.close())


def test_names_that_break_tools_are_only_names(bench, fresh):
    bench.shell(
        fresh, "touch -- '-rf' '$(id)' 'a\nb' \"q'q\" 'back\\slash' '\"' \"$(printf '\\377')\""
    )
    names = set(bench.run(fresh.list(".")))
    assert {"-rf", "$(id)", "a\nb", "q'q", "back\\slash", '"'} <= names
    assert len(bench.run(fresh.diff())) == 7


def test_tampered_tests_change_no_verdict(bench, fresh):
    broken = b"def count_words(text):\n    return -1\n"
    original = bench.run(fresh.read("wordkit/counting.py"))
    bench.run(fresh.write("wordkit/counting.py", original.replace(b"total = 0", b"total = 99")))
    bench.run(fresh.write("tests/test_counting.py", b"def test_nothing(): pass\n"))
    hook = b"import pytest\ndef pytest_runtest_makereport(item, call): pass\n"
    for path in ("conftest.py", "tests/conftest.py", "sitecustomize.py", "wordkit/conftest.py"):
        bench.run(fresh.write(path, hook))
    bench.run(fresh.write("pytest.ini", b"[pytest]\naddopts = --co -q\n"))
    bench.run(fresh.write("x.pth", b"import os; os._exit(0)\n"))
    changes = bench.run(fresh.diff())
    assert broken not in changes.values()

    async def judge():
        server = TestServer(
            open_repository(WORDKIT), LIMITS.model_copy(update={"memory_bytes": 1 << 30})
        )
        try:
            await server.start()
            tests = [test for test in server.tests if "test_counting" in test]
            return await server.run(changes, tests, COMMAND_SECONDS)
        finally:
            await server.close()

    report = bench.run(judge())
    assert not report.passed
    assert TestOutcome.FAILED in report.outcomes.values()


def test_answer_keys_are_out_of_reach(bench, tmp_path):
    repository = tmp_path / "project"
    (repository / "kit" / "__pycache__").mkdir(parents=True)
    (repository / "kit" / "work.py").write_text("def gone(): ...\n")
    answer = b"THE_ANSWER_42"
    for path in (
        "kit/__pycache__/work.cpython-311.pyc",
        ".git/objects/pack",
        ".mypy_cache/3.11/work.json",
        ".pytest_cache/v",
        "kit.egg-info/SOURCES.txt",
        "kit/work.py.orig",
        ".hypothesis/x",
        ".venv/lib/work.py",
    ):
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(answer)
    sandbox = bench.run(bench.backend.create(SandboxSpec(repository=repository, limits=LIMITS)))
    assert bench.shell(sandbox, "grep -rl THE_ANSWER . ; find . -name '.git*'; ls") == b"kit\n"
    assert bench.run(sandbox.diff()) == {}
    bench.run(sandbox.close())


def test_no_vendored_package_lies_in_the_system(bench, shared):
    found = bench.shell(
        shared,
        "find / -xdev \\( -path /proc -o -path /repo \\) -prune -o -name '*.whl' -print "
        "-o -name '*.py' -print 2>/dev/null | grep -v ^/sandbox/lib | head -100000",
        COMMAND_SECONDS,
    )
    folders = {part.decode() for line in found.splitlines() for part in line.split(b"/")[:-1]}
    assert not [path for path in found.splitlines() if path.endswith(b".whl")]
    assert folders.intersection(PACKAGES) <= {"packaging"}  # the test runner itself needs that one
    probe = f"import importlib.util as u; print([n for n in {list(PACKAGES)} if u.find_spec(n)])"
    seen = bench.run(shared.exec(f"python3 -c {shlex.quote(probe)}", COMMAND_SECONDS)).output
    assert seen == b"['packaging']\n"


def test_repository_of_another_user_is_refused_with_the_reason(tmp_path):
    async def create():
        backend = open_backend()
        try:
            await backend.create(SandboxSpec(repository=Path("/proc/sys/kernel"), limits=LIMITS))
        finally:
            await backend.close()

    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)

        async def create_from_other():
            backend = open_backend()
            try:
                await backend.create(SandboxSpec(repository=tmp_path, limits=LIMITS))
            finally:
                await backend.close()

        create = create_from_other
    with pytest.raises(InvalidArgument, match="belongs to user"):
        asyncio.run(create())
