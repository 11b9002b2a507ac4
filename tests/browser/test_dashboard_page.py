"""The dashboard in headless Chromium: it draws what the home holds, follows it live, and says when the
server is gone. Text of runs is never read as HTML.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from ostinato.flows.operating.dashboard.server import TEMPLATES
from ostinato.flows.recipe_differences import RECIPE_FILE
from ostinato.flows.stages.server_access import read_login
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.cluster.stage_status import BoxUse, ReplicaStatus, StageStatus
from ostinato.infra.platform.cluster.workspace import (
    FAILURE,
    HEARTBEAT,
    PROCESS,
    REQUEST,
    STATUS,
    Failure,
    ProgressWriter,
    make_envelope,
)
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from tests.browser.chromium import find_chromium
from tests.fakes.open_canary import open_canary
from tests.fakes.prefect_here import wait_until
from tests.fakes.trained_home import NUM_STEPS, add_attempts, fill_home, note_start

pytestmark = pytest.mark.browser
PROGRAM = [sys.executable, "-P", "-c", "from ostinato.flows.cli import main; main()", "dashboard"]
SLOW_MILLISECONDS = 60_000  # of a busy machine
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAGES = {  # address -> what is visible once it is drawn
    "#runs": "#panels canvas",
    "#attempts?run=toy-seed0%2Freinforced-bb": "#attempt-list .tabulator-row",
    "#cycles": "#canary-list td",
    "#fleet": "#versions td",
    "#status": "#parts td",
    "#reports": "#pages a",
    "attempts/reinforced-bb.g0": "article",
    "attempts/reinforced-bb.g0.t0": "article",
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    ports = {name: find_free_port() for name in ("prefect_port", "gateway_port", "dashboard_port")}
    return Settings.model_validate({"home": tmp_path, "minimum_free_disk_bytes": 0, **ports})


@pytest.fixture
def server(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """`ostinato dashboard` over a home that has trained."""
    fill_home(settings)
    environment = {**os.environ, **settings.to_environment()}
    process = subprocess.Popen(PROGRAM, env=environment)
    try:
        url = f"http://127.0.0.1:{settings.dashboard_port}/"
        wait_until("the dashboard", lambda: _listens(url), 120)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(settings: Settings) -> Iterator[Page]:
    """A page of the system's Chromium, whose user has typed the login."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        user, _, password = read_login(settings.home).partition(":")
        yield browser.new_page(http_credentials={"username": user, "password": password})
        browser.close()


def _listens(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == httpx2.codes.UNAUTHORIZED
    except httpx2.ConnectError:
        return False


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1920, "dark")])
def test_runs_are_laid_over_each_other_and_their_settings_compared(
    settings: Settings, server: subprocess.Popen[bytes], page: Page, width: int, scheme: Any
) -> None:
    for seed in (0, 1):
        directory = settings.home / f"runs/toy-seed{seed}/reinforced-cc{seed}"
        directory.mkdir(parents=True, exist_ok=True)
        request = make_envelope("toy:main", SeededRequest(seed=seed))
        (directory / REQUEST).write_text(request.model_dump_json())
        recipe = {"seed": seed, "rollout": {"group_size": 4 if seed else 8, "temperature": 1.0}}
        (directory / RECIPE_FILE).write_text(json.dumps(recipe))
        ProgressWriter(directory).update(1, 1, solve_rate=0.5 + seed / 10, learning_rate=1e-4)
        note_start(directory, time.time() - (18_000 if seed else 600), "0a1b" if seed else None)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    expect.set_options(timeout=SLOW_MILLISECONDS)
    chosen = "&".join(f"run=toy-seed{seed}%2Freinforced-cc{seed}" for seed in (0, 1))
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/#runs?{chosen}")
    expect(page.locator("#panels figure canvas")).to_have_count(2)
    expect(page.locator("#panels")).to_contain_text("toy-seed0 solve_rate0.5")
    expect(page.locator("#panels")).to_contain_text("toy-seed1 solve_rate0.6")
    expect(page.locator("#settings-title")).to_have_text("2 recipe settings differ, 0 others")
    expect(page.locator("#settings")).to_contain_text("rollout.group_size84seed01")
    assert page.evaluate(OVERFLOW) == 0
    expect(page.locator("#run-list .tabulator-col:visible .tabulator-col-title")).to_have_text(
        ["recipe", "seed", "stage", "state", "headline", "started", "took"]
    )
    of_seed_1 = page.locator("#run-list .tabulator-row:has([tabulator-field='seed']:text-is('1'))")
    expect(of_seed_1.locator(".tabulator-cell:visible")).to_have_text(
        ["toy", "1", "reinforced", "not started", "solved 0.6", "5 h ago", "5 h"]
    )
    # a plain click chooses one run alone
    expect(page.locator("#flow-run-link")).to_be_hidden()
    of_seed_1.click()
    expect(page.locator("#flow-run-link")).to_have_attribute(
        "href", f"http://127.0.0.1:{settings.prefect_port}/runs/flow-run/0a1b"
    )
    expect(page.locator("#panels")).not_to_contain_text("toy-seed0")
    page.locator("#smoothing").fill("0.5")
    expect(page.locator("#panels figure canvas")).to_have_count(2)
    page.locator("#logarithmic").check()
    expect(page.locator("#panels figure canvas")).to_have_count(2)


def test_no_page_is_wider_than_its_window(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    add_attempts(settings, groups=2)
    open_canary(settings, sessions=40, age_seconds=3_000)
    killed = settings.home / "runs/toy-seed0/pretrained-aa"
    failure = Failure(error_type="StorageError", message=f"cannot write /{'far/' * 50}")
    (killed / FAILURE).write_text(failure.model_dump_json())
    page.set_default_timeout(SLOW_MILLISECONDS)
    expect.set_options(timeout=SLOW_MILLISECONDS)
    schemes: tuple[Any, ...] = ("light", "dark")
    for width, scheme in itertools.product((1280, 1920), schemes):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        for address, drawn in PAGES.items():
            page.goto(f"http://127.0.0.1:{settings.dashboard_port}/{address}")
            expect(page.locator(drawn).first).to_be_visible()
            if address.startswith("#"):
                expect(page.locator("#state")).to_contain_text(
                    "failed-stage (toy-seed0 pretrained-aa)"
                )
            assert page.evaluate(OVERFLOW) == 0, (address, width, scheme)


def test_the_legend_shows_the_step_under_the_pointer(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    expect.set_options(timeout=SLOW_MILLISECONDS)
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/#runs?run=toy-seed0%2Freinforced-bb")
    figure = page.locator("#panels figure", has_text="solve rate and reward")
    expect(figure.locator(".u-legend")).to_contain_text("solve_rate0.42")  # the newest step
    figure.locator(".u-over").hover(position={"x": 2, "y": 40})
    expect(figure.locator(".u-legend")).to_contain_text("solve_rate0.31")
    other = page.locator("#panels figure", has_text="staleness in versions")
    for legend in (figure.locator(".u-legend"), other.locator(".u-legend")):
        expect(legend).to_contain_text(re.compile(r"step1(?!\d)"))


def test_chosen_steps_stay_when_a_run_goes_on(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    directory = settings.home / "runs/toy-seed2/reinforced-dd"
    directory.mkdir(parents=True)
    request = make_envelope("toy:main", SeededRequest(seed=2))
    (directory / REQUEST).write_text(request.model_dump_json())
    writer = ProgressWriter(directory)
    for step in range(1, 9):
        writer.update(step, 20, solve_rate=step / 20)
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/#runs?run=toy-seed2%2Freinforced-dd")
    plot = "document.querySelector('#panels figure div')?.plot"

    def await_steps(steps: int) -> None:
        # the page's policy forbids what `wait_for_function` does
        drawn = f"{plot}?.data[0].length === {steps}"
        wait_until(f"{steps} steps", lambda: page.evaluate(drawn), SLOW_MILLISECONDS / 1_000)

    await_steps(8)
    for chosen, step, shown in (("{min: 2, max: 4}", 9, [2, 4]), ("{min: 1, max: 9}", 10, [1, 10])):
        page.evaluate(f"{plot}.setScale('x', {chosen})")
        writer.update(step, 20, solve_rate=step / 20)
        await_steps(step)
        assert page.evaluate(f"[{plot}.scales.x.min, {plot}.scales.x.max]") == shown


def test_attempts_are_filtered_and_a_group_is_shown_side_by_side(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    add_attempts(settings, groups=3)
    expect.set_options(timeout=SLOW_MILLISECONDS)
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/#attempts?run=toy-seed0%2Freinforced-bb")
    attempts = page.locator("#attempt-list .tabulator-row")
    expect(attempts).to_have_count(6)
    page.locator("#attempt-list .tabulator-col", has_text="reward").locator(
        "input"
    ).press_sequentially("0.5")
    expect(attempts).to_have_count(3)
    page.get_by_role("link", name="g1").click()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("link", name="reinforced-bb.g1.t0").click()
    expect(page.get_by_role("heading", name="Verdict")).to_be_visible()


class SeededRequest(Record):
    """Request of a stage."""

    seed: int


def test_link_to_an_attempt_opens_it_and_no_script_of_a_model_runs(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    template = (TEMPLATES / "attempts.html").read_text()
    script = template[template.index("<script>") :]  # ours, as every page of attempts has it
    report = settings.home / "reports" / "toy-seed0" / "attempts.html"
    written = "<details id='a.g1.t0'><summary>one</summary><p>the answer</p></details>"
    report.write_text(f"{written}<script>document.title = 'run'</script>{script}")
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/reports/toy-seed0/attempts.html#a.g1.t0")
    expect(page.get_by_text("the answer")).to_be_visible(timeout=SLOW_MILLISECONDS)
    assert page.title() != "run"


def test_page_draws_the_home_follows_it_and_misses_its_server(
    settings: Settings, server: subprocess.Popen[bytes], page: Page
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(SLOW_MILLISECONDS)
    expect.set_options(timeout=SLOW_MILLISECONDS)
    page.goto(f"http://127.0.0.1:{settings.dashboard_port}/")
    expect(page.locator("#panels figure canvas")).to_have_count(
        3
    )  # what the newest RL run measures
    expect(page.locator("#panels")).to_contain_text("solve_rate0.42")
    expect(page.locator("#panels")).to_contain_text("no number")
    lost = "needs you: lost-checkpoint (champion of toy)"  # which this home only names
    expect(page.locator("#state")).to_have_text(f"no stage runs; {lost}.")
    page.get_by_role("link", name="Fleet").click()
    expect(page.locator("#versions")).to_contain_text(f"toy-run{NUM_STEPS - 1}delta1.1 KiB")
    expect(page.locator("#fleet-parts")).to_have_text("no RL stage runs here")
    page.get_by_role("link", name="Cycles").click()
    expect(page.locator("#cycle-list")).to_contain_text("promoted")
    expect(page.locator("#promotions")).to_contain_text("candidate/toy@1")
    expect(page.locator("#canary-list")).to_contain_text("no canary is open")

    open_canary(settings, sessions=40, age_seconds=3_000)
    expect(page.locator("#canary-list")).to_contain_text(
        "candidate/toy@2: 25 % of sessions, 10 interactions"
    )

    # a stage begins while the page is open: this process stands for it
    directory = settings.home / "runs/toy-seed0/reinforced-bb"
    (directory / PROCESS).write_text(mark_process(os.getpid()).model_dump_json())
    (directory / HEARTBEAT).touch()
    later = time.time() + 3_600  # a stage notes both again and again
    os.utime(directory / HEARTBEAT, (later, later))
    status = StageStatus(
        phase="running",
        at=later,
        replicas={"toy.engine0": ReplicaStatus(state="serving", since=time.time(), version=3)},
        boxes=BoxUse(leased=2, waiting=0),
    )
    (directory / STATUS).write_text(status.model_dump_json())
    ProgressWriter(directory).update(
        NUM_STEPS, 2 * NUM_STEPS, "step 12 <b>now</b>", solve_rate=0.77
    )
    expect(page.locator("#stages")).to_contain_text(
        "50 % 12/24 step 12 <b>now</b>", timeout=SLOW_MILLISECONDS
    )
    expect(page.locator("#state")).to_contain_text(
        f"reinforcement of toy-seed0 is at step {NUM_STEPS} of {2 * NUM_STEPS}; {lost}"
    )
    page.get_by_role("link", name="Fleet").click()
    for told in ("toy-seed0 reinforced-bbreplica engine0serving", "boxesup", "2 in use"):
        expect(page.locator("#fleet-parts")).to_contain_text(told)
    page.get_by_role("link", name="Status").click()
    expect(page.locator("#parts")).to_contain_text("toy-seed0 reinforced-bb")
    expect(page.locator("#parts")).not_to_contain_text("engine0")
    page.get_by_role("link", name="Runs").click()
    expect(page.locator("#panels")).to_contain_text("solve_rate0.77")
    assert page.locator("#stages b").count() == 0

    page.get_by_role("link", name="Reports").click()
    page.locator("#pages a").first.click()
    expect(page.locator("h1")).to_have_text("toy, seed 0")
    page.go_back()
    expect(page.locator("#state")).to_contain_text(lost)
    server.send_signal(signal.SIGKILL)
    expect(page.locator("#state")).to_contain_text("does not answer")
    assert not errors
