"""Events of checkpoints and cycles for Prefect's event feed and automations. The ledger has its own.

They go to the server of the flow run under way, elsewhere to that of PREFECT_API_URL.
"""

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

from ostinato.flows.stages.artifacts import optional
from ostinato.tasks.records import GateDecision

CREATED, PROMOTED = "created", "promoted"
REGRESSED, ROLLED_BACK = "regressed", "rolled-back"


def tell_checkpoint(what: str, checkpoint: str, **payload: object) -> None:
    """Sends checkpoint.WHAT."""
    _send(
        f"checkpoint.{what}",
        f"ostinato.checkpoint.{checkpoint}",
        {"checkpoint": checkpoint, **payload},
    )


def tell_gate(checkpoint: str, decision: GateDecision) -> None:
    """Sends checkpoint.gate.passed or checkpoint.gate.failed."""
    word = "passed" if decision.passed else "failed"
    tell_checkpoint(f"gate.{word}", checkpoint, reason=decision.reason)


def tell_skipped(cycle: str, reason: str) -> None:
    """Sends cycle.skipped."""
    _send("cycle.skipped", f"ostinato.cycle.{cycle}", {"reason": reason})


def _send(event: str, resource: str, payload: dict[str, object]) -> None:
    if FlowRunContext.get() is None and not PREFECT_API_URL.value():
        return
    with optional(event):
        emit_event(event, {"prefect.resource.id": resource}, payload=payload)
