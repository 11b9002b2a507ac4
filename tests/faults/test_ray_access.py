"""A Ray that Ostinato started answers this machine alone, and there nobody without its token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.listening import exposed, family, given_away, listeners

pytest_plugins = ["tests.fakes.ray_here"]


# a process of its own: this one may hold servers of other tests
PROGRAM = """
import os, sys
import ray
from ostinato.infra.platform.cluster.ray_start import start_ray, stop_ray
start_ray(num_cpus=1, object_store_bytes=100_000_000)
ray.get(ray.remote(lambda: 1).remote())  # a worker has ports too
print(os.environ["RAY_AUTH_TOKEN"], flush=True)
sys.stdin.read()
stop_ray()
"""


@pytest.fixture
def driver() -> Iterator[tuple[int, str]]:
    """Process id of a program that started Ray, and the token that Ray asks for."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.communicate()


def test_ray_listens_on_this_machine_alone_and_tells_strangers_nothing(
    driver: tuple[int, str],
) -> None:
    pid, token = driver
    own = family(pid)
    found = listeners(own)
    for program in ("gcs_server", "raylet"):
        assert any(program in one.command for one in found)
    assert exposed(found) == []
    given = {one.port: list(given_away(one.port, (token,))) for one in found if one.port}
    assert given == {port: [] for port in given}
    assert token
    assert not [one for one in own if token in " ".join(psutil.Process(one).cmdline())]


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
