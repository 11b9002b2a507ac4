"""What each size of an installation runs: packages of the other extras are missing in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing}));"
COMMAND = "from ostinato.infra.platform.start import ostinato; ostinato()"
OF_SERVE, OF_TRAIN = ["torch", "numba", "megatron"], ["megatron"]


def run(missing: list[str], program: str, home: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing) + program, *arguments],
        env={**os.environ, "OSTINATO_HOME": str(home), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


OPERATING = (
    "--help",
    "status",
    "recipe list",
    "plan --recipe qwen3_8b --gpus 8 --chip h100",
    "cycle show",
    "gc",
    "up --help",
)
IN_TURN = """
import json, sys
from ostinato.infra.platform.start import ostinato
for command in json.loads(sys.argv[1]):
    sys.argv = ["ostinato", *command.split()]
    print("==", command, flush=True)
    try:
        ostinato()
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
"""


def test_commands_that_operate_need_neither_torch_nor_megatron(tmp_path: Path) -> None:
    """One process runs them in turn: what is missing stays missing, and each import of it fails."""
    code, said = run(OF_SERVE, IN_TURN, tmp_path, json.dumps(OPERATING))
    assert "torch" not in said.replace("torchrun", "")
    assert code == 0, said
    begun = [line[3:] for line in said.splitlines() if line.startswith("== ")]
    assert begun == list(OPERATING)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        (OF_SERVE, "demo --recipe miniature"),
        (OF_TRAIN, "demo --recipe miniature"),
        (OF_TRAIN, "run reinforcement"),
        (OF_TRAIN, "run realtime_cycle"),
    ],
)
@pytest.mark.sampled(2)
def test_a_command_names_the_extra_before_anything_starts(
    missing: list[str], command: str, tmp_path: Path
) -> None:
    code, said = run(missing, COMMAND, tmp_path / "home", *command.split())
    assert f"{missing[0]} is not installed; `pip install 'ostinato[train]'`" in said
    assert code == 2, said
    assert not (tmp_path / "home" / "prefect").exists()


SERVING = (
    "import ostinato.tasks.realtime.traffic, ostinato.tasks.evaluation.checkpoint.run;"
    "import ostinato.flows.operating.gateway_process, ostinato.infra.serving.engine.local"
)


def test_gateway_engine_and_evaluation_need_no_megatron(tmp_path: Path) -> None:
    code, said = run(OF_TRAIN, SERVING, tmp_path)
    assert code == 0, said


def test_an_entry_that_lacks_a_package_names_the_extra(tmp_path: Path) -> None:
    program = (
        "from ostinato.infra.platform.cluster.child_main import load_entry;"
        "load_entry('ostinato.tasks.pretraining.run:main')"
    )
    code, said = run(OF_TRAIN, program, tmp_path)
    assert code != 0
    assert "megatron is not installed; `pip install 'ostinato[train]'` brings it" in said
