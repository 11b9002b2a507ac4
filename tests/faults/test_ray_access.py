"""A Ray that Ostinato started answers this machine alone, and there nobody without its token."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from tests.fakes.listening import exposed, family, given_away, listeners

pytest_plugins = ["tests.fakes.ray_here"]


@ray.remote
def work() -> int:
    return 1


def test_ray_listens_on_this_machine_alone_and_tells_strangers_nothing(ray_here: str) -> None:
    ray.get(work.remote())  # a worker has ports too
    own = family(os.getpid())
    found = [one for one in listeners(own) if "ray" in one.command or one.pid == os.getpid()]
    assert any("gcs_server" in one.command for one in found)
    assert any("raylet" in one.command for one in found)
    assert exposed(found) == []
    given = {one.port: list(given_away(one.port, ())) for one in found if one.port}
    assert given == {port: [] for port in given}
    token = os.environ["RAY_AUTH_TOKEN"]
    assert not [pid for pid in own if token in " ".join(psutil.Process(pid).cmdline())]


@pytest.mark.slow
def test_a_process_without_the_token_cannot_join(ray_here: str, tmp_path: Path) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = f"import ray; ray.init(address={ray_here!r}); print('joined')"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=known
        | {
            "RAY_AUTH_MODE": "disabled",
            "HOME": str(tmp_path),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it takes 127.0.0.1 as written
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "joined" not in done.stdout
    assert "auth" in done.stderr
