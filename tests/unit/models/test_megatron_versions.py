"""The installed Megatron-core is the one pinned for this Python, and asks for no CUDA device on a CPU."""

from importlib.metadata import version
from pathlib import Path

import torch
from megatron.core.pipeline_parallel import schedules
from packaging.requirements import Requirement

from ostinato.models.device import CPU, use_device

ROOT = Path(__file__).resolve().parents[3]


def test_installed_version_is_the_one_pinned_for_this_python() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.startswith("megatron-core==")]
    [pin] = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert version("megatron-core") in pin.specifier


def test_on_a_cpu_the_cuda_device_that_megatron_asks_for_is_the_cpu() -> None:
    use_device(CPU)
    assert torch.empty(1, device=torch.cuda.current_device()).device == CPU
    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device == CPU
