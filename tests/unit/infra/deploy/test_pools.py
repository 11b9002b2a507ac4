"""Base job templates: Prefect's workers make jobs of them, and the jobs are what boxes need."""

import json
import uuid
from typing import Any

import docker.types
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker
from prefect_docker.worker import DockerWorker, DockerWorkerJobConfiguration
from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration

from ostinato.flows.operating.deploying import pool_template
from ostinato.flows.operating.local_prefect import PoolType, deployments
from ostinato.infra.deploy import FOLDER
from ostinato.infra.sandbox.host.box import CONTAINER_OPTIONS
from tests.unit.infra.deploy.reading import refuse_unknown_fields

HOME = "OSTINATO_HOME=/var/lib/ostinato"
KINDS = {
    PoolType.PROCESS: (ProcessWorker, ProcessJobConfiguration),
    PoolType.DOCKER: (DockerWorker, DockerWorkerJobConfiguration),
    PoolType.KUBERNETES: (KubernetesWorker, KubernetesWorkerJobConfiguration),
}


async def configure(kind: PoolType, values: dict[str, Any]) -> BaseJobConfiguration:
    """The job of a flow run as the worker prepares it."""
    _, configuration = KINDS[kind]
    # nothing in a template is looked up on a server, so none is asked
    nobody = PrefectClient("http://127.0.0.1:9/api")
    template = pool_template(kind, None)
    made = await configuration.from_template_and_values(template, values, client=nobody)
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="nano-seed0")
    made.prepare_for_flow_run(run)
    return made


@pytest.mark.parametrize("kind", PoolType)
def test_prefect_accepts_the_template_and_the_worker_knows_its_fields(kind: PoolType) -> None:
    worker, configuration = KINDS[kind]
    template = pool_template(kind, None)
    WorkPoolCreate(name="here", type=kind.value, base_job_template=template)
    assert worker.type == kind.value
    assert set(template["job_configuration"]) <= set(configuration.model_fields)
    properties = template["variables"]["properties"]
    assert [name for name, item in properties.items() if not item["description"]] == []
    used = json.dumps(template["job_configuration"])
    assert [name for name in properties if f"{{{{ {name} }}}}" not in used] == []


@pytest.mark.parametrize("kind", PoolType)
async def test_variables_of_our_deployments_become_part_of_the_job(kind: PoolType) -> None:
    known = set(pool_template(kind, None)["variables"]["properties"])
    values, *others = [item["work_pool"]["job_variables"] for item in deployments()]
    assert all(other == values for other in others)
    assert set(values) <= known
    made = await configure(kind, values)
    assert made.stream_output is False
    if kind != PoolType.PROCESS:  # its worker has it, and flow runs what their worker has
        assert "PREFECT_FLOWS_HEARTBEAT_FREQUENCY" in str(made.env)


async def test_a_process_takes_no_command_environment_or_folder_from_a_flow_run() -> None:
    template = pool_template(PoolType.PROCESS, None)
    assert template["variables"]["additionalProperties"] is False
    values = {"command": "touch /x", "env": {"A": "b"}, "env.B": "c", "working_dir": "/tmp"}
    made, plain = await configure(PoolType.PROCESS, values), await configure(PoolType.PROCESS, {})
    assert isinstance(made, ProcessJobConfiguration)
    assert (made.command, made.working_dir) == (plain.command, None)
    assert {"A", "B"}.isdisjoint(made.env)


async def test_a_container_has_the_home_and_what_boxes_need() -> None:
    made = await configure(PoolType.DOCKER, {})
    assert isinstance(made, DockerWorkerJobConfiguration)
    options = made.container_create_kwargs
    assert options is not None
    host = docker.types.HostConfig(version="1.44", **options)
    assert host["SecurityOpt"] == list(CONTAINER_OPTIONS)
    assert host["ShmSize"] == 2**30
    assert host["Init"] is True
    [volume] = made.volumes
    assert volume.endswith(HOME.partition("=")[2])
    assert HOME in (FOLDER / "Containerfile").read_text()
    assert made.image == "ostinato:latest"


async def test_a_job_of_kubernetes_has_only_known_fields() -> None:
    made = await configure(PoolType.KUBERNETES, {"env": {"A": "1"}, "cpu": "8", "memory": "32Gi"})
    assert isinstance(made, KubernetesWorkerJobConfiguration)
    pod = made.job_manifest["spec"]["template"]["spec"]
    # Prefect demands both there, where Kubernetes does not know them and leaves them out
    assert (pod.pop("completions"), pod.pop("parallelism")) == (1, 1)
    refuse_unknown_fields(made.job_manifest, "V1Job")
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "32Gi"}
    assert {"name": "A", "value": "1"} in container["env"]
    assert container["args"] == ["prefect", "flow-run", "execute"]


def test_an_image_that_is_named_is_the_default() -> None:
    for kind in (PoolType.DOCKER, PoolType.KUBERNETES):
        properties = pool_template(kind, "registry.example/ostinato:1")["variables"]["properties"]
        assert properties["image"]["default"] == "registry.example/ostinato:1"
