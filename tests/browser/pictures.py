"""The pictures of docs/pictures, taken from a home in which `ostinato demo` has finished:
`python -m tests.browser.pictures HOME docs/pictures`. Starts `ostinato up` there and ends it again.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
from playwright.sync_api import Page, sync_playwright

from ostinato.flows.stages.server_access import open_api, own_access, read_login
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.settings import Settings
from tests.browser.chromium import find_chromium

OSTINATO = [sys.executable, "-P", "-c", "from ostinato.flows.cli import main; main()"]
SIZE = {"width": 1280, "height": 860}
LOAD_MILLISECONDS = 180_000
READY_SECONDS = 180.0
SETTLE_MILLISECONDS = 15_000  # Prefect's pages ask for their data bit by bit


def main(home: Path, pictures: Path) -> None:
    """Takes all pictures."""
    pictures.mkdir(parents=True, exist_ok=True)
    ports = {name: find_free_port() for name in ("prefect_port", "gateway_port", "dashboard_port")}
    settings = Settings.model_validate({"home": home, **ports})
    environment = {**os.environ, **settings.to_environment()}
    up = subprocess.Popen(
        [*OSTINATO, "up", "--recipe", "nano"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert up.stdout is not None
    for line in up.stdout:
        sys.stderr.write(line)
        if "Ctrl-C ends" in line:
            break
    try:
        with sync_playwright() as started:
            launched = started.chromium.launch(
                executable_path=find_chromium(), args=["--no-sandbox"]
            )
            user, _, password = read_login(home).partition(":")
            credentials = {"username": user, "password": password}
            page = launched.new_page(  # the dashboard asks for the login, Prefect's page keeps it
                viewport=SIZE,  # type: ignore[arg-type]
                color_scheme="light",
                http_credentials=credentials,  # type: ignore[arg-type]
            )
            kept = base64.b64encode(f"{user}:{password}".encode()).decode()
            page.add_init_script(f"localStorage.setItem('prefect-password', '{kept}')")
            for name, address in addresses(settings).items():
                take(page, address, pictures / f"{name}.png")
            launched.close()
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=120)


def addresses(settings: Settings) -> dict[str, str]:
    """Picture -> address of the page."""
    prefect = f"http://127.0.0.1:{settings.prefect_port}"
    with open_api(own_access(settings, settings.prefect_port), 60) as client:
        wait_for_worker(client)
        runs = client.post("flow_runs/filter", json={"sort": "END_TIME_DESC"}).json()
        finished = next(run for run in runs if run["state_type"] == "COMPLETED")
        chain = client.get("deployments/name/agent-training/whole-chain").json()
    dashboard = f"http://127.0.0.1:{settings.dashboard_port}"
    return {
        "deployments": f"{prefect}/deployments",
        "form": f"{prefect}/deployments/deployment/{chain['id']}/run",
        "run": f"{prefect}/runs/flow-run/{finished['id']}",
        "artifacts": f"{prefect}/artifacts",
        "dashboard": f"{dashboard}/",
        "report": f"{dashboard}/reports/nano-seed0/report.html",
        "trajectory": f"{dashboard}/reports/nano-seed0/{example_attempt(settings.home)}",
    }


def wait_for_worker(client: httpx2.Client) -> None:
    """Returns when the server knows that a worker takes runs of every deployment."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        found = client.post("deployments/filter", json={}).json()
        waits = [one["name"] for one in found if one["status"] != "READY"]
        if not waits:
            return
        assert time.monotonic() < deadline, f"deployments without a worker: {waits}"
        time.sleep(1.0)


def example_attempt(home: Path) -> str:
    """Address of the first attempt that the report links."""
    report = (home / "reports" / "nano-seed0" / "report.html").read_text()
    found = re.search(r'"(attempts\.html#[^"]+)"', report)
    assert found is not None, "the report links no attempt"
    return found[1]


def take(page: Page, address: str, picture: Path) -> None:
    """One picture of what a window shows."""
    page.goto(address, timeout=LOAD_MILLISECONDS)
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    page.screenshot(path=picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
