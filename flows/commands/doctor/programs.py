"""Checks of libraries. Heavy imports run in a child, so that a broken library cannot end the doctor."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from ostinato.flows.commands.doctor.check import Check, compare, gigabytes

_IMPORT_LIMIT_SECONDS = 180
_RAY_MEMORY_BYTES = 2 * 2**30
_PYTHON_WANTED = ((3, 11), (3, 13))
REINSTALL = "run `make setup` again"

ON_CPU = " on cpu, "  # in what the next program says
TORCH_PROGRAM = """
import torch
has_cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name() if has_cuda else f"cpu, {torch.get_num_threads()} threads"
print(f"torch {torch.__version__} on {name}")
"""
MEGATRON_PROGRAM = """
import megatron.core
from ostinato.models.device import CPU, use_device
from megatron.core.models.gpt import GPTModel
use_device(CPU)
print(f"megatron-core {megatron.core.__version__}, {GPTModel.__name__} can be imported")
"""
ENGINE_PROGRAM = """
import torch
from ostinato.models.network.transformer_engine import why_no_engine
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(why_no_engine(device) or "can be used: pretraining.transformer_engine")
"""
VLLM_PROGRAM = """
import vllm
print(f"vllm {vllm.__version__}")
"""
RAY_PROGRAM = """
import sys
from ostinato.infra.platform.cluster.actors import get_or_create_actor, wait_for
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
class Probe:
    def answer(self):
        return 42
start_ray(int(sys.argv[1]), int(sys.argv[2]))
probe = get_or_create_actor(Probe, "doctor")
assert wait_for(probe.answer.remote(), "doctor's actor", 120) == 42
stop_ray()
print("started, an actor answered, stopped")
"""


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 or 3.12."""
    low, high = _PYTHON_WANTED
    seen = ".".join(str(part) for part in version)
    fix = "install Python 3.11, then `make clean setup`"
    return compare("python", low <= tuple(version) < high, seen, "3.11 or 3.12", fix)


def check_program(name: str, program: str, fix: str, arguments: list[str] | None = None) -> Check:
    """A Python program in a child of its own. Its last line of output is the detail."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *(arguments or [])]
    root = Path(__file__).resolve().parents[3]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, cwd=root, timeout=_IMPORT_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        detail = f"no answer within {_IMPORT_LIMIT_SECONDS} s"
        return Check(name=name, ok=False, detail=detail, fix="is the machine overloaded? try again")
    output = answer.stdout if answer.returncode == 0 else answer.stderr
    lines = output.strip().splitlines() or [f"exit code {answer.returncode}"]
    is_ok = answer.returncode == 0
    return Check(name=name, ok=is_ok, detail=lines[-1], fix="" if is_ok else fix)


def check_ray(available_memory_bytes: int, object_store_bytes: int) -> Check:
    """Ray is installed and has the memory it starts with."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="ray", ok=False, detail="not installed", fix=REINSTALL)
    wanted = _RAY_MEMORY_BYTES + object_store_bytes
    seen = f"{version}, {gigabytes(available_memory_bytes)} of memory free"
    fix = "end other programs, or lower OSTINATO_OBJECT_STORE_MEMORY_BYTES"
    return compare("ray", available_memory_bytes >= wanted, seen, gigabytes(wanted), fix)
