"""The chip of this machine is read from `nvidia-smi`; what it does not name is refused with the known chips."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.planning.inputs import find_gpus

KNOWN = r"wanted --chip with a chip of \['b200', 'b300', 'gb200', 'gb300', 'h100', 'h200'\]"


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program of that name, the only one on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
    ],
)
def test_a_known_chip_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chip: str
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, f'[ "$1" = --query-gpu=name ] && echo "{name}\n{name}"')

    machine = find_gpus("--chip")

    assert (machine.chip, machine.gpus) == (chip, 2)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo NVIDIA A100-SXM4-80GB", "names the GPUs .*A100-SXM4-80GB"),
        ("echo NVIDIA H100 PCIe", "names the GPUs .*H100 PCIe"),  # not the SXM board of the inputs
        ("echo NVIDIA GH200 480GB", "names the GPUs .*GH200"),
        ("echo NVIDIA H100 80GB HBM3; echo NVIDIA H200", "names the GPUs .*H100.*H200"),
        ("exit 0", r"names the GPUs \[\]"),
        ("echo no driver >&2; exit 9", "ended with 9: no driver"),
    ],
)
def test_other_chips_and_failures_are_refused_with_the_known_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, script)

    with pytest.raises(ConfigError, match=f"nvidia-smi {problem}.*; {KNOWN}"):
        find_gpus("--chip")


def test_a_machine_without_nvidia_smi_is_refused_with_the_known_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=f"no nvidia-smi on PATH.*; {KNOWN}"):
        find_gpus("--chip")
