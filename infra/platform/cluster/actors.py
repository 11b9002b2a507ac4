"""Named Ray actors: finds or creates them, waits for their answers with a time limit, and ends them.

Ray's errors become ClusterError here.
"""

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from ostinato.infra.platform.errors import ClusterError, OstinatoError

_RESTART_POLL_SECONDS = 0.2
_END_POLL_SECONDS = 0.005
_END_SECONDS = 10


def get_or_create_actor(
    actor_class: Any,
    name: str,
    *arguments: object,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    max_concurrency: int | None = None,
    max_restarts: int = 0,
    on_node: str | None = None,
    is_movable: bool = False,
    **named_arguments: object,
) -> ActorHandle:
    """The live actor of that name, or a new one made with the arguments.

    `actor_class`: a plain class or one decorated with `ray.remote`. `on_node`: Ray's id of the machine to run on;
    None: any. `is_movable`: whether the actor starts elsewhere when that machine is gone.
    """
    _require_ray(name)
    remote_class = actor_class if hasattr(actor_class, "remote") else ray.remote(actor_class)
    options: dict[str, Any] = {
        "name": name,
        "get_if_exists": True,
        "num_cpus": num_cpus,
        "max_restarts": max_restarts,
    }
    if num_gpus:
        options["num_gpus"] = num_gpus
    if max_concurrency is not None:
        options["max_concurrency"] = max_concurrency
    if on_node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(on_node, soft=is_movable)
        options["memory"] = 1  # byte; Ray places an actor without resource needs at random
    return remote_class.options(**options).remote(*arguments, **named_arguments)


def this_node() -> str:
    """Ray's id of the machine that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def live_nodes() -> list[str]:
    """Ray's ids of all machines, this one first."""
    here = this_node()
    others = (node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    return [here, *sorted(others)]


def find_actor(name: str) -> ActorHandle | None:
    """The actor of that name, if one is registered."""
    _require_ray(name)
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _require_ray(name: str) -> None:
    # otherwise Ray would start by itself with default options
    if not ray.is_initialized():
        raise ClusterError(
            f"actor {name} needs Ray, which is not running in this process; call start_ray"
        )


def end_actor(actor: ActorHandle) -> None:
    """Ends an actor for good. It is not restarted, and no longer answers when this returns."""
    ray.kill(actor, no_restart=True)
    # Ray only sends the kill: calls made right after it may still be answered
    trials = Retrying(
        retry=retry_if_result(bool),
        wait=wait_fixed(_END_POLL_SECONDS),
        stop=stop_after_delay(_END_SECONDS),
    )
    try:
        trials(lambda: is_actor_alive(actor))
    except RetryError as error:
        raise ClusterError(f"{actor} still answers {_END_SECONDS} s after it was killed") from error


def wait_for(reference: Any, what: str, timeout_seconds: float) -> Any:
    """The result of a call. ClusterError for a dead actor or a timeout; typed errors pass."""
    try:
        return ray.get(reference, timeout=timeout_seconds)
    except GetTimeoutError as error:
        raise ClusterError(
            f"{what} gave no answer within {timeout_seconds:.0f} s; is it stuck or overloaded?"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, OstinatoError):
            raise error.cause from error
        raise
    except (RayActorError, ActorUnschedulableError, RaySystemError, WorkerCrashedError) as error:
        raise ClusterError(f"{what} failed: {type(error).__name__}: {error}") from error


async def ask(reference: Any, what: str, limit_seconds: float) -> Any:
    """The same as `wait_for`, without blocking the event loop."""
    return await asyncio.to_thread(wait_for, reference, what, limit_seconds)


def is_actor_alive(actor: ActorHandle, timeout_seconds: float = 10.0) -> bool:
    """Whether the actor answers within the limit, which should cover its longest call and its start."""
    trials = Retrying(
        retry=retry_if_exception_type(ActorUnavailableError),
        wait=wait_fixed(_RESTART_POLL_SECONDS),
        stop=stop_after_delay(timeout_seconds),
        reraise=True,
    )
    try:
        trials(lambda: ray.get(actor.__ray_ready__.remote(), timeout=timeout_seconds))
    # unschedulable: the only machine that it may run on is gone
    except (GetTimeoutError, RayActorError, ActorUnschedulableError):
        return False
    return True
