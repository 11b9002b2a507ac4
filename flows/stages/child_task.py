"""The one Prefect task of the project: runs a stage's entry in a supervised child and shows its progress.

Prefect keeps no results. A retried flow run runs its sub-flows again, and these find the finished stages.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import flow_engine, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.exceptions import Abort, PrefectException
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from prefect.tasks import Task, exponential_backoff
from pydantic import BaseModel

from ostinato.flows.stages.artifacts import link_to_plots
from ostinato.flows.stages.declared import STAGES
from ostinato.flows.stages.naming import as_key
from ostinato.flows.stages.progress import shown_pictures, shown_progress
from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.workspace import LOG, Progress
from ostinato.infra.platform.errors import is_retryable
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.tracking.forwarding import tracked

Result = TypeVar("Result", bound=BaseModel)
logger = logging.getLogger(__name__)
_CRASH_SECONDS, _COMMAND_SECONDS = 300.0, 10.0
_CANCEL_POLL_SECONDS = 5.0
_CANCEL_TIMEOUT_SECONDS = 12.0  # a worker ends its own engine sooner
_TRAINERS = {entry for stage in STAGES.values() if stage.trains for entry in stage.entries}


def keep_lease(
    lease_id: UUID, lease_duration: float, raise_on_lease_renewal_failure: bool = False
) -> AbstractContextManager[None]:
    """Prefect's own renewal of the lease of a deployment's slot, except that a failed renewal is always only logged.

    Prefect ends a healthy run when this lease cannot be renewed, as after an outage of five minutes, and no
    setting prevents it. A lost slot does no harm here: two runs that want the same stage share one child
    (infra/platform/cluster/child.py).
    """
    return maintain_concurrency_lease(
        lease_id, lease_duration, raise_on_lease_renewal_failure=False
    )


# Both take effect before any flow runs, because the engine first imports the flow and thereby this module.
# Prefect gives our loggers its handler, but no level.
flow_engine.maintain_concurrency_lease = keep_lease  # pyright: ignore[reportPrivateImportUsage]
logging.getLogger("ostinato").setLevel(logging.INFO)


class _CancelWatch(threading.Thread):
    """Thread that polls the server for a cancellation of the flow run that no worker carries out."""

    def __init__(self) -> None:
        context = contextvars.copy_context()
        super().__init__(target=context.run, args=(self._poll,), daemon=True)
        self.is_over = threading.Event()
        self.is_cancelled = False
        self._run_id: UUID | None = None

    def raise_if_cancelled(self) -> None:
        """Raises Abort, which ends a flow run without setting a state, once the run is cancelled."""
        if self.is_cancelled:
            raise Abort("the flow run was cancelled")

    def confirm(self) -> None:
        """Sets the run's state to Cancelled, now that its child has ended. This frees its slot."""
        if self._run_id is not None:
            with _server() as client:
                client.set_flow_run_state(self._run_id, Cancelled(message="its engine ended it"))

    def _poll(self) -> None:
        since: float | None = None
        if flow_run.id is None:  # the task runs outside any flow run
            return
        while not self.is_over.wait(_CANCEL_POLL_SECONDS):
            with _server() as client:
                self._run_id = self._run_id or UUID(flow_run.root_flow_run_id)
                state = client.read_flow_run(self._run_id).state
                if state is None or not (state.is_cancelling() or state.is_cancelled()):
                    since = None
                elif since is None:
                    since = time.monotonic()
                self.is_cancelled = (
                    since is not None and time.monotonic() - since > _CANCEL_TIMEOUT_SECONDS
                )


@contextmanager
def _server() -> Iterator[SyncPrefectClient]:
    """A client of the server. Errors of the block are only logged, as the server may be down."""
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
        logger.debug("cancellation cannot be checked: %s %s", type(error).__name__, error)


@contextmanager
def _cancellable() -> Iterator[Callable[[], None]]:
    """Yields a check that raises Abort when the flow run was cancelled and no worker ended it.

    A worker ends only engines that it started itself, and no worker started that of a command.
    """
    watch = _CancelWatch()
    watch.start()
    try:
        yield watch.raise_if_cancelled
    except Abort:
        watch.confirm()
        raise
    finally:
        watch.is_over.set()


def _may_retry(_: Task[Any, Any], __: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_retryable(error)


@task(
    name="run_stage_child",
    task_run_name="{name}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_condition_fn=_may_retry,
    cache_policy=NO_CACHE,
)
def run_stage(
    name: str, entry: str, request: BaseModel, result_type: type[Result], directory: Path
) -> Result:
    """Runs `entry` on the request in a child process. Returns its result."""
    logger.info("stage=%s log=%s", name, directory / LOG)
    key, settings = as_key(directory.parent.name, name), load_settings()
    link = link_to_plots(directory, settings)
    with (
        shown_progress(name, key, f"{name}: {link}") as show,
        shown_pictures(name, directory, link),
        tracked(directory, settings) as begin_tracking,
        _cancellable() as raise_if_cancelled,
    ):

        def on_progress(progress: Progress) -> None:
            show(progress)
            begin_tracking()

        return run_child(
            entry,
            request,
            result_type,
            directory=directory,
            on_progress=on_progress,
            check=raise_if_cancelled,
            settings=settings,
            alone=entry in _TRAINERS,
            # A crashed run of a deployment is restarted within minutes and continues with this child.
            outlive_seconds=_CRASH_SECONDS if deployment.id else _COMMAND_SECONDS,
        )
