"""The Slurm script: shellcheck finds nothing, what it names exists, and it starts Ray on all nodes and ends it."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ostinato.infra.deploy import FOLDER
from tests.unit.infra.deploy.reading import (
    ray_start_options,
    refuse_unknown_command,
    refuse_unknown_variables,
    run_checker,
)

SCRIPT = FOLDER / "slurm.sh"
TEXT = SCRIPT.read_text()
JOINED = TEXT.replace("\\\n", " ")
# of sbatch and srun, as their manual has them
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "exclusive", "time", "signal", "requeue", "open-mode", "output",
}  # fmt: skip
SRUN = {"nodes", "ntasks", "ntasks-per-node", "exclude"}
VARIABLES = {"SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME"}


def test_shellcheck_finds_nothing() -> None:
    assert run_checker("shellcheck", SCRIPT) == ""
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_directives_stand_first_and_are_known() -> None:
    lines = TEXT.splitlines()
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in lines[1:10]]
    assert all(found)
    assert {match[1] for match in found if match} == SBATCH
    # sbatch reads none after the first command
    assert TEXT.count("#SBATCH") == len(found)


def test_options_and_variables_exist() -> None:
    refuse_unknown_variables(set(re.findall(r"\bOSTINATO_\w+", TEXT)))
    assert set(re.findall(r"\bSLURMD?_\w+", TEXT)) == VARIABLES
    for line in re.findall(r"ray start (.*) &", JOINED):
        given = {word.partition("=")[0][2:] for word in shlex.split(line) if word[:2] == "--"}
        assert given <= ray_start_options()
    [srun] = re.findall(r"srun (.*?) ray start", JOINED)
    assert set(re.findall(r"--([a-z-]+)=", srun)) == SRUN


def test_its_own_command_and_those_of_its_comments_exist() -> None:
    [own] = re.findall(r"set -- (ostinato .*)", JOINED)
    refuse_unknown_command(own.replace("$SLURM_JOB_NUM_NODES", "2"))
    [example] = re.findall(r"sbatch --nodes=4 slurm.sh (ostinato .*)", TEXT)
    refuse_unknown_command(example.replace("my.toml", "nano"))


def test_a_missing_program_is_named_at_once(tmp_path: Path) -> None:
    told = {"OSTINATO_HOME": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([SCRIPT, "true"], env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ray is not on PATH" in done.stderr


COUNT = """
import os, pathlib, ray, sys
ray.init(address=os.environ["OSTINATO_RAY_ADDRESS"], log_to_driver=False)
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
print(sum(node["Alive"] for node in ray.nodes()), os.environ["RAY_AUTH_MODE"], oct(token.stat().st_mode))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_run_with_stand_ins_for_slurm_has_all_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    # runs what follows its options here: a second Ray node on this machine
    (programs / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    )
    (programs / "ostinato").write_text("#!/bin/bash\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    job = 1 + os.getpid() % 9999
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OSTINATO_HOME": str(tmp_path / "home"),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURMD_NODENAME": socket.gethostname(),
    }
    done = subprocess.run(
        [SCRIPT, sys.executable, "-P", "-c", COUNT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 token 0o100600" in done.stdout
    assert list((tmp_path / "home").iterdir()) == []
    deadline = time.monotonic() + 30
    while left := [
        item.pid for item in psutil.process_iter() if _is_of(item, str(20000 + job % 10000))
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _is_of(process: psutil.Process, port: str) -> bool:
    try:
        return any(f":{port}" in word or f"port={port}" in word for word in process.cmdline())
    except psutil.Error:
        return False
