"""Checks of what keeps state: ledger, object store, and the schedules of a Prefect server that runs."""

import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import httpx

from ostinato.flows.commands.doctor.check import Check, attempt
from ostinato.flows.stages.server_access import ServerAccess, open_api
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import open_object_store
from ostinato.infra.platform.settings import Settings

_ANSWER_SECONDS = 10.0
_SCHEDULER_SECONDS = 180.0  # Prefect's scheduler looks once a minute
_PAGE = 200  # the most that the server gives at once


def check_database(settings: Settings) -> Check:
    """The ledger answers and has its newest schema."""

    def read_lines() -> str:
        ledger = open_ledger(settings)
        try:
            served = ", ".join(ledger.promotions.lines()) or "none yet"
            return f"{ledger.url} answers; serving lines with a checkpoint: {served}"
        finally:
            ledger.close()

    return attempt("database", read_lines, "start the server, or set OSTINATO_LEDGER_URL")


def check_object_store(settings: Settings) -> Check:
    """An object can be written, read back and deleted."""

    def write_and_read() -> str:
        objects = open_object_store(settings)
        key = f"doctor/{uuid.uuid4().hex}"
        checksum = objects.put_bytes(key, b"ostinato")
        objects.get_bytes(key, checksum=checksum)
        objects.delete(key)
        return f"{objects.url} is writable"

    return attempt("object store", write_and_read, "set OSTINATO_OBJECT_STORE_URL and credentials")


def check_schedules(url: str, login: str | None = None, now: float | None = None) -> Check:
    """Each deployment with a schedule has runs to come, on a server that runs. `url`: of its API."""
    try:
        with open_api(ServerAccess(url, login), _ANSWER_SECONDS) as api:
            scheduled = list(_scheduled(api))
            idle = [one for one in scheduled if not _has_run_to_come(api, one["id"])]
    except httpx.ConnectError:
        return Check(name="schedules", ok=True, detail=f"no Prefect server answers at {url}")
    except (httpx.HTTPError, ValueError) as error:
        fix = "`ostinato status` tells what the server waits for"
        return Check(name="schedules", ok=False, detail=f"{url}: {error!r}", fix=fix)
    instant = time.time() if now is None else now
    late = [one for one in idle if instant - _changed_at(one) > _SCHEDULER_SECONDS]
    if not late:
        new = f", {len(idle)} of them new" if idle else ""
        return Check(name="schedules", ok=True, detail=f"{len(scheduled)} deployments{new}")
    names = ", ".join(one["name"] for one in late)
    since = min(instant - _changed_at(one) for one in late) / 60
    return Check(
        name="schedules",
        ok=False,
        detail=(
            f"no run to come of {names}, whose schedule is {since:.0f} min old: the scheduler of "
            f"{url} does not schedule, wanted runs within {_SCHEDULER_SECONDS:.0f} s"
        ),
        fix=(
            "pip install 'sqlalchemy<2.1' where the server runs (with 2.1 the scheduler of Prefect 3.8 "
            "fails), unset PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED, start the server again"
        ),
    )


def _scheduled(api: httpx.Client) -> Iterator[dict[str, Any]]:
    """Deployments that are not paused and have an active schedule."""
    offset = 0
    while page := _ask(api, "deployments/filter", {"limit": _PAGE, "offset": offset}):
        yield from (
            one
            for one in page
            if not one["paused"] and any(each["active"] for each in one["schedules"])
        )
        offset += len(page)


def _has_run_to_come(api: httpx.Client, deployment: str) -> bool:
    wanted = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    return _ask(api, "flow_runs/count", wanted) > 0


def _ask(api: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
    return api.post(path, json=body).raise_for_status().json()


def _changed_at(deployment: Mapping[str, Any]) -> float:
    """When the deployment or its newest schedule was written."""
    texts = [deployment["updated"], *(each["updated"] for each in deployment["schedules"])]
    return max(datetime.fromisoformat(text).timestamp() for text in texts if text)
