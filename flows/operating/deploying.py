"""Process entry of deploying: `python -m ostinato.flows.operating.deploying --recipe nano`, to the server of `PREFECT_API_URL`.

Work pool, queues with their limits, deployments and automations become as written here and in prefect.yaml, however
often it runs. Those that it made earlier and that are no longer written are deleted.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, CallWebhook, ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from ostinato.flows.operating.local_prefect import (
    DEPLOYED,
    PREFECT,
    REPOSITORY,
    WORK_POOL,
    PoolType,
    deployments,
)
from ostinato.flows.operating.recipe_choice import RecipeChoice, add_choice, choice_of
from ostinato.infra.deploy import FOLDER

QUEUES = {"training": 1, "realtime": 1, "ci": 2, "operations": 4}  # concurrent flow runs of each
AUTOMATION = "ostinato: "  # prefix of our automations' names
_OUR_DEPLOYMENTS = DeploymentFilter(tags=DeploymentFilterTags(all_=[DEPLOYED]))
_OURS = "made by `ostinato deploy`"  # description of our queues, which may be deleted
ALARM = "ostinato-alarm"  # name of the webhook block on the server that alarms call
CYCLE, RESUMING = "every-5-hours", "after-a-crash"  # deployments of prefect.yaml
FAILED_CYCLES, _ALARM_WINDOW = 3, timedelta(hours=16)  # three cycles, which are five hours apart
_HEARTBEATS_MISSED = timedelta(seconds=90)  # three heartbeats


def main() -> None:
    """Deploys everything for one recipe."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.operating.deploying")
    add_choice(parser)
    parser.add_argument("--pool", type=PoolType, default=PoolType.PROCESS)
    parser.add_argument("--image")
    given = parser.parse_args()
    with get_client(sync_client=True) as client:
        make_pool(client, given.pool, given.image)
        _deploy_all(choice_of(given))
        prune_deployments(client)
        refuse_unknown_parameters(client)
        prune_queues(client)
        make_automations(client)


def make_pool(client: SyncPrefectClient, kind: PoolType, image: str | None) -> None:
    """Creates or updates the work pool and its queues. An existing pool of containers keeps its owner's changes, except
    for a given image. A pool of processes gets the template that lets no flow run choose its command, environment or
    folder.
    """
    try:
        pool = client.read_work_pool(WORK_POOL)
    except ObjectNotFound:
        wanted = WorkPoolCreate(
            name=WORK_POOL, type=kind.value, base_job_template=pool_template(kind, image)
        )
        client.create_work_pool(wanted)
    else:
        if pool.type != kind:
            sys.exit(
                f"work pool {WORK_POOL} is of type {pool.type}, wanted {kind.value}: deploy with "
                f"--pool {pool.type}, or `prefect work-pool delete {WORK_POOL}` first"
            )
        template = pool.base_job_template
        if kind == PoolType.PROCESS:
            template = pool_template(kind, None)
        elif image is not None:
            template = _with_image(template, image)
        if template != pool.base_job_template:
            client.update_work_pool(WORK_POOL, WorkPoolUpdate(base_job_template=template))
    for name, limit in QUEUES.items():
        try:
            client.create_work_queue(
                name, description=_OURS, concurrency_limit=limit, work_pool_name=WORK_POOL
            )
        except ObjectAlreadyExists:
            known = client.read_work_queue_by_name(name, work_pool_name=WORK_POOL)
            client.update_work_queue(known.id, description=_OURS, concurrency_limit=limit)


def pool_template(kind: PoolType, image: str | None) -> dict[str, Any]:
    """The base job template that infra/deploy has for a type of pool, with the image if one is given."""
    template = json.loads((FOLDER / f"pool_{kind.value}.json").read_text())
    return template if image is None else _with_image(template, image)


def _with_image(template: dict[str, Any], image: str) -> dict[str, Any]:
    changed = copy.deepcopy(template)
    changed["variables"]["properties"]["image"]["default"] = image
    return changed


def prune_deployments(client: SyncPrefectClient) -> None:
    """Deletes our deployments that prefect.yaml no longer has, with their limits and triggers. Also deletes the
    schedules of a deployment without any in prefect.yaml, except those without a slug, which people made.
    """
    wanted = {(item["entrypoint"].rpartition(".")[2], item["name"]): item for item in deployments()}
    for found in client.read_deployments(deployment_filter=_OUR_DEPLOYMENTS):
        flow = (found.entrypoint or "").rpartition(".")[2]
        item = wanted.get((flow, found.name))
        if item is None:
            client.delete_resource_owned_automations(f"prefect.deployment.{found.id}")
            client.delete_deployment(found.id)
        elif not item.get("schedules"):  # else `prefect deploy` has replaced them
            for schedule in filter(lambda item: item.slug, found.schedules):
                client.delete_deployment_schedule(found.id, schedule.id)


def refuse_unknown_parameters(client: SyncPrefectClient) -> None:
    """Makes the server refuse runs of our deployments with a parameter that the flow does not have."""
    for found in client.read_deployments(deployment_filter=_OUR_DEPLOYMENTS):
        schema = {**(found.parameter_openapi_schema or {}), "additionalProperties": False}
        client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=schema))


def prune_queues(client: SyncPrefectClient) -> None:
    """Deletes queues of the pool that an earlier version made. Other people's queues stay."""
    for queue in client.read_work_queues(work_pool_name=WORK_POOL):
        if queue.description == _OURS and queue.name not in QUEUES:
            client.delete_work_queue_by_id(queue.id)


def make_automations(client: SyncPrefectClient) -> None:
    """Creates or updates our automations by name, and deletes those that are no longer written."""
    known = {
        automation.name: automation.id
        for automation in client.read_automations()
        if automation.name.startswith(AUTOMATION)
    }
    for automation in automations(_alarm(client)):
        if automation.name in known:
            client.update_automation(known.pop(automation.name), automation)
        else:
            client.create_automation(automation)
    for stale in known.values():
        client.delete_automation(stale)


def _alarm(client: SyncPrefectClient) -> ActionTypes:
    """The action of an alarm: calls the webhook block of the server's owner. Without a block the alarm is only an event."""
    try:
        block = client.read_block_document_by_name(ALARM, "webhook")
    except ObjectNotFound:
        return DoNothing()
    text = {"text": "{{ automation.name }}: {{ event.resource.name }}"}
    return CallWebhook(block_document_id=block.id, payload=json.dumps(text))


def automations(alarm: ActionTypes) -> Iterator[AutomationCore]:
    """Automations that mark a run without a heartbeat as crashed, and that call the alarm when the real-time cycle
    fails repeatedly or a run crashed too often to be resumed. Automations that start a deployment are in prefect.yaml.
    """
    ours = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{DEPLOYED}"}
    every_run = {"prefect.resource.id": "prefect.flow-run.*"}
    yield AutomationCore(
        name=f"{AUTOMATION}mark lost runs",
        description="A run whose heartbeat stopped is marked as crashed.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification.model_validate(every_run),
            match_related=ResourceSpecification.model_validate(ours),
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            threshold=1,
            within=_HEARTBEATS_MISSED,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                message="its heartbeat stopped",
                force=False,
            )
        ],
    )
    for name, deployment, threshold, within in (
        ("alarm: cycles fail", CYCLE, FAILED_CYCLES, _ALARM_WINDOW),
        ("alarm: a run crashed too often", RESUMING, 1, timedelta(0)),
    ):
        of_it = {"prefect.resource.role": "deployment", "prefect.resource.name": deployment}
        yield AutomationCore(
            name=f"{AUTOMATION}{name}",
            description=f"{threshold} failed runs of {deployment} call the webhook block {ALARM}, if the "
            "server has one.",
            trigger=EventTrigger(
                posture=Posture.Reactive,
                match=ResourceSpecification.model_validate(every_run),
                match_related=ResourceSpecification.model_validate(of_it),
                expect={"prefect.flow-run.Failed", "prefect.flow-run.GivenUp"},
                threshold=threshold,
                within=within,
            ),
            actions=[alarm],
        )


def _deploy_all(recipe: RecipeChoice) -> None:
    """Runs `prefect deploy --all` with this recipe in place of the one in prefect.yaml. The recipe's changes
    become default overrides of each deployment.
    """
    changed = {"options": {"overrides": [*recipe.overrides]}} if recipe.overrides else {}
    text = (REPOSITORY / "prefect.yaml").read_text()
    document = yaml.safe_load(text)
    for item in document["deployments"]:
        if item["parameters"].get("recipe") == document["definitions"]["chain"]["recipe"]:
            item["parameters"] = {**item["parameters"], "recipe": recipe.name, **changed}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prefect.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        command = [*PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command[3:])}` failed: {(done.stderr + done.stdout)[-800:]}")


if __name__ == "__main__":
    main()
