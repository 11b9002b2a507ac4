"""Triton's interpreter must be chosen before Triton is imported, so its cases run in their own
process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("chosen", "cases"),
    [("not nightly", 17), pytest.param("", 48, marks=pytest.mark.nightly)],
    ids=["a case of each", "all"],
)
def test_every_triton_kernel_equals_its_reference(chosen: str, cases: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "python_files=cases.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", chosen, str(CASES)],
        cwd=CASES.parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
    passed = re.search(r"(\d+) passed", answer.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= cases
