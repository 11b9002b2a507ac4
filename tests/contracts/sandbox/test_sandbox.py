"""What every sandbox backend must do."""

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.errors import SandboxError, SandboxLost
from ostinato.infra.sandbox import NamespaceSandbox
from tests.contracts.sandbox.conftest import LIMITS
from tests.fakes.repositories import WORDKIT, open_repository


def run(runner: asyncio.Runner, box: NamespaceSandbox, command: str, seconds: float = 40.0):
    return runner.run(box.exec(command, seconds))


def test_exec_gives_output_and_exit_code(runner, box):
    result = run(runner, box, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.timed_out, result.truncated) == (3, False, False)
    assert sorted(result.output.split()) == [b"err", b"out"]


def test_exec_cuts_the_middle_of_long_output(runner, box):
    result = runner.run(box.exec("seq 1 100000", 10, output_cap_bytes=1000))
    assert result.truncated
    assert result.output.startswith(b"1\n2\n")
    assert result.output.endswith(b"99999\n100000\n")
    assert len(result.output) < 1100


def test_exec_timeout_keeps_what_was_printed(runner, box):
    result = run(runner, box, "echo before; sleep 60", 0.3)
    assert result.timed_out
    assert result.exit_code < 0
    assert result.output == b"before\n"


def test_exec_timeout_ends_a_command_that_ignores_term(runner, box):
    result = run(runner, box, "trap '' TERM; while true; do :; done", 0.2)
    assert result.timed_out
    assert result.wall_seconds < 5


def test_exec_runs_commands_side_by_side(runner, box):
    async def both():
        return await asyncio.gather(
            box.exec("while [ ! -e go ]; do :; done; echo heard", 10), box.exec("touch go", 10)
        )

    first, second = runner.run(both())
    assert first.output == b"heard\n"
    assert second.exit_code == 0


def test_exec_returns_while_a_background_process_holds_the_output(runner, box):
    result = run(runner, box, "setsid sleep 30 & echo started")
    assert result.output == b"started\n"
    assert result.wall_seconds < 5


def test_read_returns_what_write_put(runner, box):
    content = bytes(range(256)) * 100
    runner.run(box.write("new/folder/file.bin", content))
    assert runner.run(box.read("new/folder/file.bin")) == content
    assert "file.bin" in runner.run(box.list("new/folder"))


@pytest.mark.parametrize(
    "path", ["missing.py", "wordkit", "/proc/self/maps", "../proc/1/environ", "/etc/hostname"]
)
def test_read_refuses_what_is_no_file_of_the_repository(runner, box, path):
    with pytest.raises(SandboxError):
        runner.run(box.read(path))


def test_read_refuses_links_into_the_server(runner, box):
    run(runner, box, "ln -s /proc/1/maps link; ln -s /opt/python/lib library; mkfifo pipe")
    for path in ("link", "library/libc.so", "pipe"):
        with pytest.raises(SandboxError):
            runner.run(box.read(path))


def test_write_refuses_paths_outside(runner, box):
    with pytest.raises(SandboxError):
        runner.run(box.write("/opt/escape", b""))


def test_diff_names_exactly_what_differs(runner, box):
    assert runner.run(box.diff()) == {}
    run(
        runner,
        box,
        "echo x > new.txt; rm wordkit/shaping.py; touch wordkit/counting.py; ln -s / link",
    )
    assert runner.run(box.diff()) == {"new.txt": b"x\n", "wordkit/shaping.py": None}


def test_diff_sees_an_edit_that_keeps_size_and_time(runner, box):
    before = runner.run(box.read("wordkit/counting.py"))
    command = (
        "cp -p wordkit/counting.py /tmp/k; sed -i 's/total = 0/total = 1/' wordkit/counting.py; "
    )
    run(runner, box, command + "touch -r /tmp/k wordkit/counting.py")
    assert runner.run(box.diff()) == {
        "wordkit/counting.py": before.replace(b"total = 0", b"total = 1")
    }


def test_reset_puts_back_files_and_ends_processes(runner, box):
    run(
        runner,
        box,
        "rm -r tests; chmod 000 wordkit; mkdir -p a/b; echo x > /tmp/left; setsid sleep 60 &",
    )
    runner.run(box.reset({"wordkit/counting.py": b"broken = True\n", "wordkit/shaping.py": None}))
    assert runner.run(box.diff()) == {
        "wordkit/counting.py": b"broken = True\n",
        "wordkit/shaping.py": None,
    }
    left = run(runner, box, "ls /tmp; ls -d a; pgrep sleep; ls tests | wc -l").output
    assert b"left" not in left
    assert left.endswith(b"3\n")
    runner.run(box.reset())
    assert runner.run(box.diff()) == {}


def test_reset_answers_commands_that_were_running(runner, box):
    async def interrupted():
        command = asyncio.create_task(box.exec("sleep 30", 60))
        await asyncio.sleep(0)
        while b"sleep" not in (await box.exec("ps ax", 10)).output:
            pass
        await box.reset()
        with pytest.raises(SandboxError, match="reset"):
            await command

    runner.run(interrupted())


def test_network_is_unreachable_but_loopback_works(runner, box):
    script = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname())\n"
        "print('loopback')\n"
        "try: socket.create_connection(('1.1.1.1', 80), timeout=2); print('outside')\n"
        "except OSError: print('closed')\n"
    )
    runner.run(box.write("/tmp/net.py", script.encode()))
    assert run(runner, box, "python /tmp/net.py").output == b"loopback\nclosed\n"


def test_host_files_and_installed_packages_are_absent(runner, box):
    assert (
        run(runner, box, "ls /root /home /work /var /etc/passwd 2>/dev/null | wc -l").output
        == b"0\n"
    )
    names = ("pip", "torch", "setuptools", "test.test_itertools")
    imports = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert run(runner, box, f'python -c "{imports}"').output == b"[]\n"
    assert run(runner, box, "python -m pytest -q tests 2>&1 | tail -1").output.startswith(
        b"15 passed"
    )


def test_server_is_closed_to_the_box(runner, box):
    command = (
        "cat /proc/1/environ /proc/1/maps; ls -l /proc/1/fd/3; "
        "kill -9 1; kill -INT 1; kill -TERM 1; echo alive"
    )
    output = run(runner, box, command).output
    assert output.count(b"ermission denied") >= 2
    assert output.endswith(b"alive\n")
    assert run(runner, box, "unshare --user true || echo refused").output.endswith(b"refused\n")


def test_limits_hold_for_file_memory_and_disk(runner, box):
    assert run(runner, box, "head -c 20M /dev/zero > big").exit_code != 0
    assert (
        run(runner, box, "for i in 1 2 3 4 5 6; do head -c 7M /dev/zero > $i; done").exit_code != 0
    )
    runner.run(box.reset())
    assert run(runner, box, "python -c 'x = bytearray(3 << 30)'").exit_code != 0
    assert run(runner, box, "echo still here").output == b"still here\n"


def test_fork_bomb_leaves_the_box_usable(runner, box):
    run(runner, box, "bomb() { bomb | bomb & }; bomb; sleep 0.5", 2.0)
    runner.run(box.reset())
    assert run(runner, box, "echo fine").output == b"fine\n"


def test_boxes_do_not_see_one_another(runner, box):
    async def second():
        other = await NamespaceSandbox.open(open_repository(WORDKIT), LIMITS)
        try:
            await box.exec("echo secret > /tmp/secret; echo secret > secret; setsid sleep 20 &", 5)
            return await other.exec("ls /tmp /dev/shm; ls secret; pgrep sleep", 5)
        finally:
            await other.close()

    assert b"secret" not in runner.run(second()).output.replace(b"'secret'", b"")


def test_killed_host_takes_its_boxes_along(tmp_path):
    script = (
        "import asyncio, time\n"
        "from ostinato.infra.sandbox import NamespaceSandbox\n"
        "from tests.fakes.repositories import WORDKIT, open_repository\n"
        "async def hold():\n"
        "    box = await NamespaceSandbox.open(open_repository(WORDKIT))\n"
        "    start = 'setsid sh -c \\'touch up; exec sleep 987654\\' &'\n"
        "    await box.exec(start + ' while [ ! -e up ]; do :; done', 50)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(100)\n"
        "asyncio.run(hold())\n"
    )
    (tmp_path / "hold.py").write_text(script)
    host = subprocess.Popen(
        [sys.executable, str(tmp_path / "hold.py")],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"ready\n"
    inside = list(psutil.Process(host.pid).children(recursive=True))
    commands = [process.as_dict(["cmdline"], ad_value=[])["cmdline"] for process in inside]
    assert any("987654" in command for command in commands)
    host.kill()
    host.communicate()
    assert psutil.wait_procs(inside, timeout=20)[1] == []


def test_kernel_without_user_namespaces_gives_the_fix(tmp_path):
    script = (
        "import asyncio\n"
        "from ostinato.infra.sandbox import NamespaceSandbox\n"
        "from tests.fakes.repositories import WORDKIT, open_repository\n"
        "asyncio.run(NamespaceSandbox.open(open_repository(WORDKIT)))\n"
    )
    (tmp_path / "open_box.py").write_text(script)
    refuse = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", refuse, sys.executable, str(tmp_path / "open_box.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        timeout=50,
    )
    assert "ostinato.infra.platform.errors.SandboxError: box" in done.stderr
    assert "sysctl -w user.max_user_namespaces" in done.stderr


def test_closed_box_is_lost(runner):
    async def use_after_close():
        sandbox = await NamespaceSandbox.open(open_repository(WORDKIT), LIMITS)
        await sandbox.close()
        assert sandbox.is_lost
        await sandbox.exec("true", 1)

    with pytest.raises(SandboxLost):
        runner.run(use_after_close())
