"""A Ray that Ostinato started answers nobody without its token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["tests.fakes.ray_here"]


@pytest.mark.slow
def test_a_process_without_the_token_cannot_join(ray_here: str, tmp_path: Path) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = f"import ray; ray.init(address={ray_here!r}); print('joined')"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=known | {"RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "joined" not in done.stdout
    assert "auth" in done.stderr
