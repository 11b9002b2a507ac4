"""The one Prefect task of the project: runs a stage's entry in a supervised child, shows progress.

The Prefect side of a stage: retries of transient errors, persisted JSON result, progress artifact.
What makes a stage resume is infra/platform/cluster/child.py, not Prefect's cache.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff
from pydantic import BaseModel

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import Progress
from ostinato.infra.platform.errors import is_retryable
from ostinato.infra.platform.telemetry.progress_bar import StageBar

Result = TypeVar("Result", bound=BaseModel)


def _may_retry(_: Task[Any, Any], __: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_retryable(error)


@task(
    task_run_name="{name}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_condition_fn=_may_retry,
    persist_result=True,
    result_serializer="json",
    cache_policy=NO_CACHE,
)
def run_stage_child(name: str, entry: str, request: BaseModel, directory: Path) -> dict[str, Any]:
    """Runs `entry` on the request in a child process. Returns its result as JSON."""
    key = re.sub(r"[^a-z0-9]+", "-", name.lower())
    artifact_id: Any = create_progress_artifact(
        0.0, key=key, description=f"{name}: {directory.name}"
    )
    with StageBar(name, partial(update_progress_artifact, artifact_id)) as bar:

        def relay(progress: Progress) -> None:
            bar.update(progress.done, progress.total, progress.message)

        return run_child(
            entry, request, _AnyResult, directory=directory, on_progress=relay
        ).model_dump(mode="json")


class _AnyResult(BaseModel, extra="allow"):
    """The result as the child wrote it. `run_stage` gives it its type."""


def run_stage(
    name: str, entry: str, request: BaseModel, result_type: type[Result], directory: Path
) -> Result:
    """Runs a stage as a Prefect task and returns its typed result."""
    return result_type.model_validate(run_stage_child(name, entry, request, directory))
