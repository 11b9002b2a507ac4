"""Programs that start beside each other."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ostinato.infra.platform.cluster.services import (
    Service,
    ServiceGroup,
    await_ready,
    run_foreground,
)
from ostinato.infra.platform.errors import ClusterError

DIES = "import time; time.sleep(0.3); raise SystemExit('port taken')"
WAITS = "import time; time.sleep(600)"


def test_a_program_ends_when_what_it_waits_for_dies_while_starting(tmp_path: Path) -> None:
    service = Service(
        name="server",
        command=[sys.executable, "-c", DIES],
        log_path=tmp_path / "server.log",
        is_ready=lambda: False,
    )
    began = time.monotonic()
    with ServiceGroup() as services:
        starting = services.launch(service)
        with pytest.raises(ClusterError, match="port taken"):
            run_foreground([sys.executable, "-c", WAITS], {}, lambda: await_ready(starting))
    assert time.monotonic() - began < 60


def test_a_program_ends_whatever_fails_while_it_starts() -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        run_foreground([sys.executable, "-c", WAITS], {}, fail)
    assert all(WAITS not in child.cmdline() for child in psutil.Process().children())


def test_a_program_may_be_what_a_service_waits_for(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    service = Service(
        name="server",
        command=[sys.executable, "-c", WAITS],
        log_path=tmp_path / "server.log",
        is_ready=begun.exists,
    )
    with ServiceGroup() as services:
        starting = services.launch(service)
        program = [sys.executable, "-c", touch, str(begun)]
        assert run_foreground(program, {}, lambda: await_ready(starting)) == 0


@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "nohup"])
def test_a_closed_terminal_ends_a_command_unless_nohup_started_it(is_ignored: bool) -> None:
    program = (
        "import os, signal\n"
        "from ostinato.infra.platform.cluster.services import interrupt_on_signals\n"
        "interrupt_on_signals()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    action = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, action),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("goes on" in done.stdout) is is_ignored, done.stderr
    assert ("KeyboardInterrupt" in done.stderr) is not is_ignored
