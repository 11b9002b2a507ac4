"""Names of flow runs that have no engine yet: scheduled ones, and those that are dropped before they begin."""

from datetime import UTC, datetime, timedelta

from ostinato.flows.operating.local_prefect import DEPLOYED
from ostinato.flows.recipe import run_title
from ostinato.flows.stages.server_access import ServerAccess, open_api

_RECENT = timedelta(minutes=10)


def name_waiting_runs(access: ServerAccess) -> None:
    """Gives waiting runs the name that they will have. Prefect's own until then is two words."""
    since = (datetime.now(tz=UTC) - _RECENT).isoformat()
    not_begun = {
        "start_time": {"is_null_": True},
        "expected_start_time": {"after_": since},
        "tags": {"all_": [DEPLOYED]},
    }
    with open_api(access, timeout=10) as api:
        waiting = api.post("/flow_runs/filter", json={"flow_runs": not_begun}).raise_for_status()
        unnamed = [run for run in waiting.json() if " " not in run["name"]]
        if not unnamed:
            return
        flows = api.post("/flows/filter", json={}).raise_for_status().json()
        names = {flow["id"]: flow["name"] for flow in flows}
        for run in unnamed:
            title = run_title(names[run["flow_id"]], run["parameters"])
            if title != run["name"]:
                api.patch(f"/flow_runs/{run['id']}", json={"name": title}).raise_for_status()
