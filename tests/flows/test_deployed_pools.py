"""`ostinato deploy --pool` against a real Prefect server: the pool is of the type and with the image that were named."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ostinato.flows.operating import local_prefect
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import open_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server without workers."""
    settings, port = Settings(home=tmp_path_factory.mktemp("home")), find_free_port()
    told = local_prefect.prefect_environment(settings, port)
    with ServiceGroup() as services:
        services.start(local_prefect.server_service(settings, port, told))
        yield told["PREFECT_API_URL"]


def deploy(server: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PREFECT_API_URL": server, "OSTINATO_HOME": str(home)}
    environment.pop("OSTINATO_REPOSITORY", None)
    program = "from ostinato.flows.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "deploy", "--recipe", "miniature", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def pool(api: httpx.Client) -> dict:
    return api.get("work_pools/ostinato").raise_for_status().json()


def test_pool_of_containers_is_made_and_kept(server: str, tmp_path: Path) -> None:
    with open_api(f"{server}/") as api:
        done = deploy(
            server, tmp_path, "--pool", "docker", "--image", "registry.example/ostinato:1"
        )
        assert done.returncode == 0, done.stderr
        made = pool(api)
        assert made["type"] == "docker"
        properties = made["base_job_template"]["variables"]["properties"]
        assert properties["image"]["default"] == "registry.example/ostinato:1"
        deployment = api.get("deployments/name/reinforcement/manual").raise_for_status().json()
        assert deployment["work_pool_name"] == "ostinato"
        [step] = deployment["pull_steps"]
        # a place in the image, not on the machine that deploys
        assert "/opt/ostinato" in str(step) or "$OSTINATO_REPOSITORY" in str(step)

        refused = deploy(server, tmp_path, "--pool", "kubernetes")
        assert refused.returncode == 2
        assert "is of type docker, wanted kubernetes" in " ".join(refused.stderr.split())
        assert pool(api)["base_job_template"] == made["base_job_template"]


def test_image_of_a_pool_of_processes_is_refused_at_once(tmp_path: Path) -> None:
    refused = deploy("http://127.0.0.1:9/api", tmp_path, "--image", "ostinato:1")
    assert refused.returncode == 2
    assert "--image is 'ostinato:1' with a pool of processes" in " ".join(refused.stderr.split())
