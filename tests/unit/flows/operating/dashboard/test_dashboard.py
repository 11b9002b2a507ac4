"""The dashboard's data are those of the home, and its server tells them to this machine alone."""

import json
import os
import tempfile
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ostinato.flows.operating.dashboard.runs import MAX_STEPS, RunPage, read_run
from ostinato.flows.operating.dashboard.server import build_app
from ostinato.flows.operating.dashboard.snapshot import SnapshotReader
from ostinato.flows.recipe_differences import RECIPE_FILE
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.cluster.workspace import (
    METRICS,
    REQUEST,
    ProgressWriter,
    make_envelope,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.infra.platform.telemetry import MetricsLog, read_metrics
from tests.fakes.open_canary import open_canary
from tests.fakes.trained_home import NUM_STEPS, add_attempts, fill_home, note_start

LOGIN = ("ostinato", "drawn")


def here(home: Path) -> Settings:
    """Settings whose ports nobody listens on."""
    ports = {"prefect_port": find_free_port(), "gateway_port": find_free_port()}
    return Settings.model_validate({"home": home, "minimum_free_disk_bytes": 0, **ports})


def app_over(settings: Settings) -> FastAPI:
    return build_app(settings, ":".join(LOGIN))


def client(
    app: FastAPI, host: str = "127.0.0.1:8401", login: tuple[str, str] | None = LOGIN
) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url=f"http://{host}", auth=login)


def test_snapshot_holds_what_the_run_left(tmp_path: Path) -> None:
    settings = here(tmp_path)
    fill_home(settings)
    note_start(tmp_path / "runs/toy-seed0/reinforced-bb", 1_000.0, "0a1b")
    snapshot = SnapshotReader(settings).take()
    listed = {run.stage: run for run in snapshot.runs}
    assert (listed["pretrained"].headline, listed["reinforced"].headline) == ("loss", "solve_rate")
    assert listed["reinforced"].value == pytest.approx(0.3 + NUM_STEPS / 100)
    assert listed["reinforced"].run == "toy-seed0/reinforced-bb"
    assert (listed["reinforced"].recipe, listed["reinforced"].seed) == ("toy", "0")
    assert (listed["reinforced"].began_at, listed["pretrained"].began_at) == (1_000.0, None)
    assert [listed[name].flow_run_id for name in ("reinforced", "pretrained")] == ["0a1b", None]
    assert (listed["reinforced"].steps, listed["reinforced"].total_steps) == (NUM_STEPS, NUM_STEPS)
    [newest] = snapshot.versions
    assert (newest.version, newest.kind, newest.stored_bytes) == (NUM_STEPS - 1, "delta", 1_110)
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
    assert (snapshot.runs, snapshot.versions, snapshot.cycles) == ((), (), ())
    assert not (tmp_path / "none" / "ledger.db").exists()


def test_long_curves_are_thinned_to_their_last_point(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "toy-seed0" / "pretrained-aa"
    directory.mkdir(parents=True)
    writer = ProgressWriter(directory)
    for step in range(1, 3 * MAX_STEPS + 2):
        writer.update(step, 10_000, "bulk", loss=float(step))
    [curve] = read_run(directory).curves
    steps, losses = curve.series["loss"]
    assert MAX_STEPS / 2 < len(steps) <= MAX_STEPS
    assert losses[-1] == 3 * MAX_STEPS + 1


def _read_bytes() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_an_update_reads_appended_lines_and_those_that_it_draws(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "toy-seed0" / "pretrained-aa"
    directory.mkdir(parents=True)
    log = MetricsLog(directory / METRICS)
    for step in range(30 * MAX_STEPS):
        log.append(step, {"loss": 1.0})
    read_run(directory)
    log.append(30 * MAX_STEPS, {"loss": 2.0})
    before = _read_bytes()
    [curve] = read_run(directory).curves
    assert curve.series["loss"][1][-1] == 2.0
    assert _read_bytes() - before < log.path.stat().st_size / 10


CHANGES = ("append", "torn line", "repeated step", "shortened", "replaced", "written anew", "gone")


@examples(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(1, 5)), max_size=12))
def test_an_update_shows_what_the_file_holds_now(changes: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home, "runs", "toy-seed0", "pretrained-aa")
        path, step = directory / METRICS, 0
        directory.mkdir(parents=True)
        for number, (change, count) in enumerate([("append", 3), *changes]):
            if change in ("replaced", "written anew", "gone"):
                kept = path.with_name("earlier")  # keeps the inode in use
                path.rename(kept) if change == "replaced" and path.exists() else None
                path.write_bytes(b"") if change == "written anew" else path.unlink(missing_ok=True)
                step = 0
            if change == "shortened" and path.exists():
                os.truncate(path, path.stat().st_size * count // 6)
            if change == "repeated step":
                step = max(0, step - count)
            for _ in range(count if change not in ("shortened", "gone") else 0):
                step += 1
                log = MetricsLog(path)
                log.append(step, {"loss": float(10 * number + step)})
                log.close()
            if change == "torn line":
                with path.open("ab") as file:
                    file.write(b'{"step":')
            shown = [curve.series["loss"] for curve in read_run(directory).curves]
            rows = [row for row in read_metrics(path) if "loss" in row]
            wanted = ([row["step"] for row in rows], [row["loss"] for row in rows])
            assert [tuple(map(list, series)) for series in shown] == ([wanted] if rows else [])


async def test_a_run_has_its_plots_settings_and_attempts(tmp_path: Path) -> None:
    settings = here(tmp_path)
    fill_home(settings)
    add_attempts(settings, groups=2, in_flight=3)
    request = make_envelope("toy:main", StageRequest(seed=3, checkpoint_directory="/home/me"))
    directory = tmp_path / "runs/toy-seed0/reinforced-bb"
    (directory / REQUEST).write_text(request.model_dump_json())
    (directory / RECIPE_FILE).write_text('{"seed": 3, "rollout": {"group_size": 4}}')
    async with client(app_over(settings)) as local:
        page = RunPage.model_validate_json((await local.get("/runs/toy-seed0/reinforced-bb")).text)
        assert (page.settings, page.recipe) == ({"seed": 3}, {"seed": 3, "rollout.group_size": 4})
        drawn = {curve.key: curve for curve in page.curves}
        assert len(drawn["solve-rate"].series["solve_rate"][0]) == NUM_STEPS
        assert drawn["solve-rate"].starts_at_zero
        lines = (await local.get("/runs/toy-seed0/reinforced-bb/attempts")).json()
        assert [line["trajectory_id"] for line in lines] == [
            f"reinforced-bb.g{group}.t{attempt}" for group in (1, 0) for attempt in (1, 0)
        ]
        assert [line["solved"] for line in lines] == [False, True] * 2
        assert {line["turns"] for line in lines} == {1}
        one = await local.get("/attempts/reinforced-bb.g1.t0")
        assert "Verdict" in one.text
        group = await local.get("/attempts/reinforced-bb.g1")
        assert "2 attempts at one problem" in group.text
        whole = await local.get("/attempts/reinforced-bb")
        assert whole.headers["location"] == "/#attempts?run=toy-seed0%2Freinforced-bb"
        for name in (
            "/runs/toy-seed0/none",
            "/runs/../toy-seed0",
            "/runs/toy-seed0/..",
            "/attempts/no",
        ):
            assert (await local.get(name)).status_code == httpx2.codes.NOT_FOUND


class StageRequest(Record):
    """Request of a stage."""

    seed: int
    checkpoint_directory: str


async def test_a_ledger_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    settings = here(tmp_path)
    fill_home(settings)
    (tmp_path / "ledger.db").write_text("no database " * 200)
    async with client(app_over(settings)) as local:
        for path in ("/runs/toy-seed0/reinforced-bb/attempts", "/attempts/reinforced-bb.g0"):
            answer = await local.get(path)
            assert answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE
            assert "ledger" in answer.json()["detail"]


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
        assert told["versions"][0]["kind"] == "delta"
        # a name of somebody else's that points here, as in DNS rebinding
        assert (await rebound.get("/snapshot")).status_code == 400
        for path in ("/", "/snapshot", "/events"):
            assert (await local.post(path)).status_code == 405


@pytest.mark.parametrize("login", [None, ("ostinato", ""), ("", "drawn"), ("ostinato", "drawn ")])
async def test_who_has_no_login_reads_nothing(
    tmp_path: Path, login: tuple[str, str] | None
) -> None:
    async with client(app_over(here(tmp_path)), login=login) as stranger:
        paths = ("/assets/dashboard.js", "/reports/a.html", "/runs/a/b", "/attempts/a", "/no")
        for path in ("/", "/snapshot", "/events", *paths):
            answer = await stranger.get(path)
            assert answer.status_code == httpx2.codes.UNAUTHORIZED
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert answer.content == b""
