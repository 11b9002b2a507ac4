"""The installed command on a machine that never saw it: no noise, completion, and Ctrl-C at any moment of its loading."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("ostinato")
START = "from ostinato.infra.platform.start import ostinato; ostinato()"
# mapped by Python in turn while the command loads: by pydantic, the ledger, the arrays
MOMENTS = ("pydantic_core", "sqlalchemy", "numpy")


def typed(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a home where nothing is, with nothing else of this machine's environment."""
    told = {"PATH": "/usr/bin:/bin", "HOME": str(home), **environment}
    command = [SCRIPT, *arguments]
    return subprocess.run(command, cwd=home, env=told, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", ["--version", "--help", "recipe list", "status", "keys list"])
@pytest.mark.sampled(2)
def test_what_it_says_is_its_own_alone(tmp_path: Path, arguments: str) -> None:
    answer = typed(tmp_path, *arguments.split())
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout
    if arguments == "--version":
        assert answer.stdout.strip() == importlib.metadata.version("ostinato")


@pytest.mark.parametrize(
    ("words", "completed"), [("ostinato rec", "recipe"), ("ostinato evaluate --js", "--json")]
)
def test_words_are_completed(tmp_path: Path, words: str, completed: str) -> None:
    asked = {
        "_OSTINATO_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    assert typed(tmp_path, **asked).stdout.split() == [completed]


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    script = f"{SCRIPT} --install-completion; echo done"  # by the name of its parent
    told = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    subprocess.run(["bash", "-c", script], env=told, check=True, capture_output=True)
    [written] = (tmp_path / ".bash_completions").iterdir()
    assert "_OSTINATO_COMPLETE" in written.read_text()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.sampled(1)
def test_ctrl_c_while_it_loads_is_no_traceback(tmp_path: Path, moment: str) -> None:
    arguments = ["plan", "--recipe", "kimi_k2", "--gpus", "512", "--chip", "h200"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START, *arguments],
        env={**os.environ, "OSTINATO_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while moment not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
