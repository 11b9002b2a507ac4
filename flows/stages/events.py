"""Events of checkpoints and cycles for Prefect's event feed and automations. The ledger keeps its own events.

Events go to the server of the current flow run, or outside of one to that of PREFECT_API_URL.
"""

from collections.abc import Mapping
from uuid import NAMESPACE_URL, uuid5

from prefect.context import FlowRunContext
from prefect.events import Event, Resource, emit_event
from prefect.settings import PREFECT_API_URL, get_current_settings

from ostinato.flows.stages.artifacts import optional
from ostinato.flows.stages.server_access import ServerAccess, open_api
from ostinato.tasks.records import GateDecision

CREATED, PROMOTED = "created", "promoted"
REGRESSED, ROLLED_BACK = "regressed", "rolled-back"
WITHDRAWN = "withdrawn"  # a canary that was not judged in time
_SEND_SECONDS = 5.0  # the gateway retries after five more


def send_checkpoint_event(
    what: str, checkpoint: str, labels: Mapping[str, str] | None = None, **payload: object
) -> None:
    """Sends checkpoint.WHAT. Triggers can match on `labels`."""
    _send(
        f"checkpoint.{what}",
        f"ostinato.checkpoint.{checkpoint}",
        {"checkpoint": checkpoint, **payload},
        labels,
    )


def send_event_now(what: str, checkpoint: str, key: str, **payload: object) -> bool:
    """Sends checkpoint.WHAT from a process that is not a flow run, and waits for the server. Returns whether
    the server has the event; True without a server. The same `key` makes the same event, which the server
    drops when it had it within five minutes.
    """
    access = server_of_settings()
    if not access.url:
        return True
    event = Event(
        event=f"checkpoint.{what}",
        resource=Resource({"prefect.resource.id": f"ostinato.checkpoint.{checkpoint}"}),
        payload={"checkpoint": checkpoint, **payload},
        id=uuid5(NAMESPACE_URL, f"checkpoint.{what}/{key}"),
    )
    with optional(event.event), open_api(access, _SEND_SECONDS) as api:
        api.post("/events", json=[event.model_dump(mode="json")]).raise_for_status()
        return True
    return False


def server_of_settings() -> ServerAccess:
    """The server that Prefect's settings name. Its address is empty without one."""
    server = get_current_settings().api
    login = server.auth_string
    return ServerAccess(server.url or "", None if login is None else login.get_secret_value())


def send_gate_event(
    checkpoint: str, decision: GateDecision, promotion: Mapping[str, object] | None = None
) -> None:
    """Sends checkpoint.gate.passed or checkpoint.gate.failed. A passed event with `promotion` requests a
    promotion with these parameters.
    """
    word = "passed" if decision.passed else "failed"
    parameters = promotion if decision.passed else None
    labels = None if parameters is None else {"ostinato.promotion": "asked"}
    send_checkpoint_event(
        f"gate.{word}", checkpoint, labels, reason=decision.reason, **(parameters or {})
    )


def send_cycle_skipped(cycle: str, reason: str) -> None:
    """Sends cycle.skipped."""
    _send("cycle.skipped", f"ostinato.cycle.{cycle}", {"reason": reason})


def send_evaluation_skipped(recipe: str, reason: str) -> None:
    """Sends evaluation.skipped."""
    _send("evaluation.skipped", f"ostinato.recipe.{recipe}", {"reason": reason})


def _send(
    event: str,
    resource: str,
    payload: dict[str, object],
    labels: Mapping[str, str] | None = None,
) -> None:
    if FlowRunContext.get() is None and not PREFECT_API_URL.value():
        return
    with optional(event):
        emit_event(event, {"prefect.resource.id": resource, **(labels or {})}, payload=payload)
