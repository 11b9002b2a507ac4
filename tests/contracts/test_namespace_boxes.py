"""What boxes of bubblewrap must do beyond the protocol: end with their host, and say what is missing."""

import asyncio
import errno
import json
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ostinato.infra.sandbox.backends import open_backend
from ostinato.infra.sandbox.host import system
from ostinato.infra.sandbox.host.system_calls import MACHINES, REFUSED
from ostinato.infra.sandbox.protocol import SandboxSpec, TestReport
from ostinato.infra.sandbox.snapshots.layers import remove_folder
from ostinato.infra.sandbox.test_server import TestServer
from tests.contracts.sandbox_backends import running_bench
from tests.fakes.processes import is_running, wait_for_child, wait_for_end
from tests.fakes.repositories import WORDKIT, open_repository


def test_host_files_and_installed_packages_are_absent_and_pytest_runs():
    names = ("pip", "torch", "setuptools", "test.test_itertools")
    imports = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    with running_bench(open_backend) as bench:
        box = bench.create()
        listed = "ls /root /home /work /var /etc/passwd 2>/dev/null | wc -l"
        assert bench.shell(box, listed) == b"0\n"
        assert bench.shell(box, f'python -c "{imports}"') == b"[]\n"
        tests = bench.shell(box, "python -m pytest -q tests 2>&1 | tail -1")
        assert tests.startswith(b"15 passed")


def test_kernel_parts_that_boxes_would_share_are_refused():
    numbers = {name: columns[MACHINES[platform.machine()][0]] for name, columns in REFUSED.items()}
    program = (
        "import ctypes, json, socket\n"
        "kernel = ctypes.CDLL(None, use_errno=True)\n"
        "def error_of(number):\n"
        "    # what add_key would take; of no meaning to the others\n"
        "    called = kernel.syscall(number, b'user', b'left behind', b'x', 1, -4)\n"
        "    return ctypes.get_errno() if called == -1 else 0\n"
        "def open_family(family):\n"
        "    try:\n"
        "        return bool(socket.socket(family, socket.SOCK_STREAM).close())\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "def open_pair(family):\n"
        "    try:\n"
        "        return [one.close() for one in socket.socketpair(family, socket.SOCK_STREAM)] == []\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        f"errors = {{name: error_of(number) for name, number in {numbers}.items()}}\n"
        "print(json.dumps([errors, [open_family(family) for family in (1, 2, 10, 38, 40)],\n"
        "    [open_pair(family) for family in (1, 30, 38, 40)]]))\n"
    )
    with running_bench(open_backend) as bench:
        box = bench.create()
        errors, families, pairs = json.loads(bench.shell(box, f"python -c {shlex.quote(program)}"))
    assert errors == dict.fromkeys(numbers, errno.EPERM)
    assert families == [False, False, False, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT]
    assert pairs == [False, *[errno.EAFNOSUPPORT] * 3]


def test_what_is_the_hosts_own_keeps_its_mode_and_times():
    """Tried with what they are, so that a box which may do it does no harm."""
    program = (
        "import os\n"
        "def names(folder):\n"
        "    return [f'{folder}/{n}' for n in os.listdir(folder) if not n.isdigit() and n not in ('shm', 'pts')]\n"
        "for place in names('/dev') + names('/proc') + ['/proc/sys/kernel/ostype', '/usr/bin/env']:\n"
        "    if os.path.islink(place): continue\n"
        "    known = os.stat(place)\n"
        "    for change in (\n"
        "        lambda: os.chmod(place, known.st_mode & 0o7777),\n"
        "        lambda: os.utime(place, ns=(known.st_atime_ns, known.st_mtime_ns)),\n"
        "        lambda: os.utime(place, ns=(known.st_atime_ns, known.st_mtime_ns), follow_symlinks=False),\n"
        "    ):\n"
        "        try: print('changed', place, change())\n"
        "        except OSError: pass\n"
        "open('/dev/null', 'w').write('x')\n"
        "print(len(open('/dev/urandom', 'rb').read(8)), open('/proc/self/oom_score_adj').read())\n"
    )
    with running_bench(open_backend) as bench:
        assert bench.shell(bench.create(), f"python -c {shlex.quote(program)}") == b"8 1000\n\n"


def test_a_box_cannot_make_others_wait_for_files_that_all_have():
    program = (
        "import fcntl, os\n"
        "file = os.open('/usr/bin/env', os.O_RDONLY)\n"
        "for kind, of in ((fcntl.F_SETLEASE, fcntl.F_RDLCK), (fcntl.F_NOTIFY, fcntl.DN_ACCESS)):\n"
        "    try: print('taken', fcntl.fcntl(file, kind, of))\n"
        "    except PermissionError: print('refused')\n"
        "fcntl.lockf(os.open('/tmp/mine', os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)\n"
    )
    with running_bench(open_backend) as bench:
        seen = bench.shell(bench.create(), f"python -c {shlex.quote(program)}")
    assert seen == b"refused\nrefused\n"


def test_kernel_without_overlays_of_read_only_folders_still_has_boxes(monkeypatch):
    for kept in (system._host_mounts, system._prepared_mounts):
        monkeypatch.setattr(system, kept.__name__, kept.__wrapped__)
    monkeypatch.setattr(system, "can_stack", lambda folder: False)

    async def run_tests() -> TestReport:
        server = TestServer(open_repository(WORDKIT))
        try:
            await server.start()
            return await server.run({}, server.tests[:1])
        finally:
            await server.close()

    assert asyncio.run(run_tests()).passed
    with running_bench(open_backend) as bench:
        seen = bench.shell(
            bench.create(), "python -c 'print(1)'; grep -c 'overlay ro' /proc/mounts"
        )
    assert seen == b"1\n0\n"


def test_a_backend_that_closes_waits_for_boxes_that_are_ending(monkeypatch):
    removed = []

    def remove_slowly(folder: Path) -> None:
        time.sleep(0.2)
        remove_folder(folder)
        removed.append(folder.name)

    async def close_at_once() -> list[str]:
        backend = open_backend()
        box = await backend.create(SandboxSpec(repository=open_repository(WORDKIT).directory))
        monkeypatch.setattr("ostinato.infra.sandbox.snapshots.store.remove_folder", remove_slowly)
        ending = asyncio.create_task(box.close())
        await asyncio.sleep(0.05)
        await backend.close()
        found = [*removed]
        await ending
        return found

    assert asyncio.run(close_at_once())[0] == "b0"  # before the folder of all


def test_killed_host_takes_its_boxes_along(tmp_path):
    script = (
        "import asyncio, time\n"
        "from ostinato.infra.sandbox.environment import open_box\n"
        "from tests.fakes.repositories import WORDKIT, open_repository\n"
        "async def hold():\n"
        "    async with open_box(open_repository(WORDKIT)) as box:\n"
        "        start = 'setsid sh -c \\'touch up; exec sleep 987654\\' &'\n"
        "        await box.exec(start + ' while [ ! -e up ]; do :; done', 200)\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "asyncio.run(hold())\n"
    )
    (tmp_path / "hold.py").write_text(script)
    host = subprocess.Popen(
        [sys.executable, str(tmp_path / "hold.py")],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"ready\n"
    inside = wait_for_child(psutil.Process(host.pid), "987654")
    host.kill()
    host.communicate()
    wait_for_end(lambda: [process for process in inside if is_running(process)])


def test_kernel_without_user_namespaces_gives_the_fix(tmp_path):
    script = (
        "import asyncio\n"
        "from ostinato.infra.sandbox.environment import open_box\n"
        "from tests.fakes.repositories import WORDKIT, open_repository\n"
        "async def hold():\n"
        "    async with open_box(open_repository(WORDKIT)):\n"
        "        pass\n"
        "asyncio.run(hold())\n"
    )
    (tmp_path / "open_box.py").write_text(script)
    refuse = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", refuse, sys.executable, str(tmp_path / "open_box.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=200,
    )
    assert "ostinato.infra.platform.errors.SandboxError: box" in done.stderr
    assert "sysctl -w user.max_user_namespaces" in done.stderr


def test_missing_compiler_gives_the_fix(tmp_path):
    script = (
        "import tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from ostinato.infra.sandbox.host.system import build_agent\n"
        "build_agent()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": str(tmp_path)},
        timeout=200,
    )
    assert "SandboxError: no C compiler" in done.stderr
    assert "apt install gcc libc6-dev" in done.stderr
    assert "pip install ziglang" in done.stderr
