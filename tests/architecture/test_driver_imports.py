"""The process that drives an RL run joins parts that live in other processes: it loads few of our modules, and no Megatron."""

import subprocess
import sys

MAX_MODULES = 220
PROGRAM = """
import sys
import ostinato.tasks.reinforcement.run
print(*sys.modules)
"""


def test_driver_of_a_run_imports_few_modules_and_no_megatron() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    names = ran.stdout.split()
    ours = [name for name in names if name.startswith("ostinato.")]
    assert 100 < len(ours) <= MAX_MODULES
    assert not [name for name in names if name.startswith("megatron")]
