"""`ostinato deploy --pool` against a real Prefect server: the pool is of the type and with the image that were named."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ostinato.flows.operating import local_prefect
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.prefect_here import open_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What processes are told of a server without workers."""
    settings, port = Settings(home=tmp_path_factory.mktemp("home")), find_free_port()
    told = local_prefect.prefect_environment(settings, port)
    with ServiceGroup() as services:
        services.start(local_prefect.server_service(settings, port, told))
        yield told


def deploy(server: dict[str, str], home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    named = {name: server[name] for name in server if name.startswith("PREFECT_API_")}
    environment = {**os.environ, **named, "OSTINATO_HOME": str(home)}
    environment.pop("OSTINATO_REPOSITORY", None)
    program = "from ostinato.flows.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "deploy", "--recipe", "miniature", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def pool(api: httpx2.Client) -> dict:
    return api.get("work_pools/ostinato").raise_for_status().json()


@pytest.fixture(scope="module")
def deployed(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The server, deployed to once."""
    image = ("--image", "registry.example/ostinato:1")
    done = deploy(server, tmp_path_factory.mktemp("deploys"), "--pool", "docker", *image)
    assert done.returncode == 0, done.stderr
    return server


@pytest.mark.nightly
def test_pool_of_containers_is_made_and_kept(deployed: dict[str, str], tmp_path: Path) -> None:
    with open_api(deployed) as api:
        made = pool(api)
        assert made["type"] == "docker"
        properties = made["base_job_template"]["variables"]["properties"]
        assert properties["image"]["default"] == "registry.example/ostinato:1"
        deployment = api.get("deployments/name/reinforcement/reinforce").raise_for_status().json()
        assert deployment["work_pool_name"] == "ostinato"
        [step] = deployment["pull_steps"]
        # a place in the image, not on the machine that deploys
        assert "/opt/ostinato" in str(step) or "$OSTINATO_REPOSITORY" in str(step)

        refused = deploy(deployed, tmp_path, "--pool", "kubernetes")
        assert refused.returncode == 2
        assert "is of type docker, wanted kubernetes" in " ".join(refused.stderr.split())
        assert pool(api)["base_job_template"] == made["base_job_template"]


def test_image_of_a_pool_of_processes_is_refused_at_once(tmp_path: Path) -> None:
    refused = deploy(
        {"PREFECT_API_URL": "http://127.0.0.1:9/api"}, tmp_path, "--image", "ostinato:1"
    )
    assert refused.returncode == 2
    assert "--image is 'ostinato:1' with --pool process" in " ".join(refused.stderr.split())


@pytest.mark.nightly
def test_deploying_takes_away_what_it_made_and_no_longer_wants(
    deployed: dict[str, str], tmp_path: Path
) -> None:
    """What an earlier version left, and beside it what people of the same server made."""
    with open_api(deployed) as api:
        kept = api.get("deployments/name/agent-training/whole-chain").raise_for_status().json()
        before = everything(api)
        [training] = [queue for queue in queues(api) if queue["name"] == "training"]

        post(api, "work_pools/ostinato/queues", name="old", description=training["description"])
        post(api, "work_pools/ostinato/queues", name="theirs", description="for us")
        flow = post(api, "flows/", name="old-flow")["id"]
        for name, tags in (("old", ["ostinato"]), ("theirs", [])):
            made = post(
                api,
                "deployments/",
                name=name,
                flow_id=flow,
                tags=tags,
                entrypoint="ostinato.flows.old_flow.old_flow",
                work_pool_name="ostinato",
                work_queue_name=name,
                concurrency_limit=3,
            )["id"]
            post(api, "automations/", **automation(f"{name} trigger", made))
        post(api, "automations/", **automation("old trigger of a deployment", kept["id"]))
        post(api, "automations/", **automation("ostinato: old", None))
        post(api, "automations/", **automation("their automation", None))
        weekly = {"schedule": {"interval": 604_800}, "active": True}
        for slug in ("old-weekly", None):
            post(api, f"deployments/{kept['id']}/schedules", [weekly | {"slug": slug}])

        assert deploy(deployed, tmp_path, "--pool", "docker").returncode == 0
        now = everything(api)
        more = {kind: now[kind] - names for kind, names in before.items()}
        assert len(more.pop("limits")) == 1
        assert more == {
            "deployments": {"theirs"},
            "queues": {"theirs"},
            "automations": {"theirs trigger", "their automation"},
            "schedules": {("whole-chain", None)},
        }
        assert not any(names - now[kind] for kind, names in before.items())


def everything(api: httpx2.Client) -> dict[str, set]:
    """Names of what deploying makes."""
    deployments = post(api, "deployments/filter")
    return {
        "deployments": {
            one["name"] if one["name"] == "theirs" else one["entrypoint"] for one in deployments
        },
        "queues": {one["name"] for one in queues(api)},
        "automations": {one["name"] for one in post(api, "automations/filter")},
        "schedules": {
            (one["name"], schedule["slug"]) for one in deployments for schedule in one["schedules"]
        },
        "limits": {one["name"] for one in post(api, "v2/concurrency_limits/filter")},
    }


def queues(api: httpx2.Client) -> list[dict]:
    return post(api, "work_pools/ostinato/queues/filter")


def automation(name: str, deployment: str | None) -> dict:
    """One that would start a deployment, as `prefect deploy` makes it; of nobody's when there is none."""
    owner = {} if deployment is None else {"owner_resource": f"prefect.deployment.{deployment}"}
    trigger = {"type": "event", "expect": ["never"], "posture": "Reactive", "threshold": 1}
    return {"name": name, "trigger": trigger, "actions": [{"type": "do-nothing"}], **owner}


def post(api: httpx2.Client, path: str, rows: list | None = None, /, **body: Any) -> Any:
    answer = api.post(path, json=body if rows is None else rows)
    assert answer.is_success, answer.text
    return answer.json()
