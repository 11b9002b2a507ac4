"""`torch.compile` after Megatron-core's import: nothing is loaded before the first call, and it compiles then."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import ostinato.models
import megatron.core
import torch

@torch.compile
def decorated(x): return x

double = torch.compile(lambda x: 2 * x, backend="eager")
assert "torch._dynamo" not in sys.modules
print(float(double(torch.ones(()))), float(double(torch.ones(()))), "torch._dynamo" in sys.modules)
module = torch.compile(torch.nn.Identity(), backend="eager")
print(type(module).__name__)
"""


def test_a_function_is_compiled_by_its_first_call() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # with a GPU nothing waits
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "2.0", "True", "OptimizedModule"]
