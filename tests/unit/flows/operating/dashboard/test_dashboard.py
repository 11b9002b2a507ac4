"""The dashboard's data are those of the home, and its server tells them to this machine alone."""

import json
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ostinato.flows.operating.dashboard.server import build_app
from ostinato.flows.operating.dashboard.snapshot import MAX_STEPS, SnapshotReader
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.cluster.workspace import ProgressWriter
from ostinato.infra.platform.settings import Settings
from tests.fakes.open_canary import open_canary
from tests.fakes.trained_home import NUM_STEPS, fill_home

LOGIN = ("ostinato", "drawn")


def here(home: Path) -> Settings:
    """Settings whose ports nobody listens on."""
    ports = {"prefect_port": find_free_port(), "gateway_port": find_free_port()}
    return Settings.model_validate({"home": home, "minimum_free_disk_bytes": 0, **ports})


def app_over(settings: Settings) -> FastAPI:
    return build_app(SnapshotReader(settings).take, settings.home / "reports", ":".join(LOGIN))


def client(
    app: FastAPI, host: str = "127.0.0.1:8401", login: tuple[str, str] | None = LOGIN
) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", auth=login)


def test_snapshot_holds_what_the_run_left(tmp_path: Path) -> None:
    settings = here(tmp_path)
    fill_home(settings)
    snapshot = SnapshotReader(settings).take()
    curves = {curve.title: curve.series for curve in snapshot.curves}
    assert curves["loss of toy-seed0 pretrained"]["loss"][1][-1] == pytest.approx(4 / NUM_STEPS)
    rates = curves["RL: solve rate and reward of sampled attempts"]
    assert len(rates["solve_rate"][0]) == NUM_STEPS
    [chain] = snapshot.chains
    assert [row.version for row in chain] == list(range(NUM_STEPS))
    assert [row.kind for row in chain].count("anchor") == 2
    assert [row.cycle_id for row in snapshot.cycles] == ["toy-0-7"]
    assert [row.checkpoint_id for row in snapshot.promotions] == ["candidate/toy@1"]
    assert snapshot.pages == ("toy-seed0/report.html",)


def test_snapshot_has_the_open_canary(tmp_path: Path) -> None:
    settings = here(tmp_path)
    open_canary(settings, sessions=40, age_seconds=3_000)
    [canary] = SnapshotReader(settings).take().canaries
    assert (canary.line, canary.candidate.interactions) == ("toy", 10)


def test_fresh_home_has_a_snapshot(tmp_path: Path) -> None:
    snapshot = SnapshotReader(here(tmp_path / "none")).take()
    assert (snapshot.curves, snapshot.chains, snapshot.cycles) == ((), (), ())
    assert not (tmp_path / "none" / "ledger.db").exists()


def test_long_curves_are_thinned_to_their_last_point(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "toy-seed0" / "pretrained-aa"
    directory.mkdir(parents=True)
    writer = ProgressWriter(directory)
    for step in range(1, 3 * MAX_STEPS + 2):
        writer.update(step, 10_000, "bulk", loss=float(step))
    [curve] = SnapshotReader(here(tmp_path)).take().curves
    steps, losses = curve.series["loss"]
    assert MAX_STEPS / 2 < len(steps) <= MAX_STEPS
    assert losses[-1] == 3 * MAX_STEPS + 1


async def test_page_reports_and_snapshot_are_served_to_this_machine(tmp_path: Path) -> None:
    settings = here(tmp_path)
    fill_home(settings)
    (tmp_path / "secret.txt").write_text("no")
    app = app_over(settings)
    async with client(app) as local, client(app, "rebound.example") as rebound:
        page = await local.get("/")
        assert "dashboard.js" in page.text
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert (await local.get("/assets/dashboard.js")).status_code == 200
        assert "toy, seed 0" in (await local.get("/reports/toy-seed0/report.html")).text
        assert (await local.get("/reports/..%2fsecret.txt")).status_code == 404
        told = json.loads((await local.get("/snapshot")).text)
        assert told["chains"][0][0]["kind"] == "anchor"
        # a name of somebody else's that points here, as in DNS rebinding
        assert (await rebound.get("/snapshot")).status_code == 400
        for path in ("/", "/snapshot", "/events"):
            assert (await local.post(path)).status_code == 405


@pytest.mark.parametrize("login", [None, ("ostinato", ""), ("", "drawn"), ("ostinato", "drawn ")])
async def test_who_has_no_login_reads_nothing(
    tmp_path: Path, login: tuple[str, str] | None
) -> None:
    async with client(app_over(here(tmp_path)), login=login) as stranger:
        for path in ("/", "/snapshot", "/events", "/assets/dashboard.js", "/reports/a.html", "/no"):
            answer = await stranger.get(path)
            assert answer.status_code == httpx.codes.UNAUTHORIZED
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert answer.content == b""
