"""A disk that is full at any write of a checkpoint: a typed error names it, the last checkpoint stays, and with room the
same call goes on.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL_DISK = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'


def failures(part: str, directory: Path) -> int:
    """How many writes failed before one had room."""
    around = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK]
    program = [sys.executable, "-m", "tests.faults.full_disk_program", part, str(directory)]
    done = subprocess.run(
        [*around, str(directory), *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("part", ["resume_points", "steps"])
@pytest.mark.nightly
def test_a_checkpoint_that_finds_no_room_leaves_the_last_one(part: str, tmp_path: Path) -> None:
    assert failures(part, tmp_path) > 40  # pages of a checkpoint


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_stage_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    assert failures("stage", tmp_path) >= 2
