"""Nothing that listens while `ostinato up` runs does or tells anything for a stranger: a web page that the user has
open, a name that resolves to this machine, another user of the machine. The ports are found, not listed.
"""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from ostinato.flows.operating import local_prefect
from ostinato.flows.stages.server_access import (
    LOGIN_FILE,
    ServerAccess,
    is_own_server,
    open_api,
    read_login,
)
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from tests.fakes.listening import EVIL, Listener, exposed, family, given_away, listeners
from tests.fakes.prefect_here import PrefectHere, prefect_here, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MARK = "mark-of-a-report"
PARTS = {"prefect_server", "dashboard", "worker"}
SOCKETS = ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectHere]:
    """Server, deployments, worker and dashboard as `ostinato up` starts them."""
    home = tmp_path_factory.mktemp("home")
    (home / "reports" / "one").mkdir(parents=True)
    (home / "reports" / "one" / "report.html").write_text(MARK)
    with prefect_here(home) as here:
        settings = here.settings.model_copy(update={"dashboard_port": find_free_port()})
        told = {**here.environment, **settings.to_environment()}
        here.services.start(local_prefect.dashboard(settings, told))
        run = here.start(here.deployment("rollback/serve-previous")["id"])
        engine = wait_until("engine of a run", lambda: engine_of(here, run), 120)
        engine.suspend()  # the worker listens while it runs a flow
        wait_until("server, dashboard and worker", lambda: parts_of(here) == PARTS, 120)
        yield here
        engine.kill()


def engine_of(here: PrefectHere, run: str) -> psutil.Process | None:
    try:
        return here.engine_of(run)
    except AssertionError:  # not yet started
        return None


def found(here: PrefectHere) -> list[Listener]:
    roots = [running.process.pid for running in here.services.running]
    return listeners(family(*roots, home=here.settings.home))


def parts_of(here: PrefectHere) -> set[str]:
    """The parts of `ostinato up` that listen."""
    commands = [one.command for one in found(here)]
    return {part for part in PARTS if any(part in command for command in commands)}


def test_everything_listens_on_this_machine_alone(here: PrefectHere) -> None:
    assert parts_of(here) == PARTS
    assert exposed(found(here)) == []


def test_no_port_tells_a_stranger_anything_or_lets_a_page_read(here: PrefectHere) -> None:
    marks = (MARK, read_login(here.settings.home).partition(":")[2], "realtime-cycle")
    given = {one.port: list(given_away(one.port, marks)) for one in found(here) if one.port}
    assert given == {port: [] for port in given}


def test_foreign_name_is_refused_whatever_it_asks(here: PrefectHere) -> None:
    for one in found(here):
        for path in ("/", "/api/health", "/ui-settings", "/snapshot"):
            for name in ("evil.example", f"evil.example:{one.port}", "127.0.0.1.evil.example"):
                try:
                    answer = httpx2.get(
                        f"http://127.0.0.1:{one.port}{path}", headers={"host": name}, timeout=20
                    )
                except httpx2.HTTPError:
                    continue  # speaks no HTTP
                assert answer.status_code == httpx2.codes.BAD_REQUEST, (one, path, name)


@pytest.mark.parametrize("path", SOCKETS)
def test_socket_without_the_login_gets_nothing(here: PrefectHere, path: str) -> None:
    url = f"ws://127.0.0.1:{here.port}/api/{path}"
    for protocols in (None, ["prefect"]):
        for first in ('{"type": "auth"}', '{"type": "auth", "token": "ostinato:"}', "{}"):
            got = []
            try:
                with connect(url, origin=EVIL, subprotocols=protocols, open_timeout=20) as socket:
                    socket.send(first)
                    got.append(socket.recv(timeout=20))
            except (WebSocketException, TimeoutError):
                pass
            assert got == []


def attack(api: httpx2.Client, marker: Path, **how: Any) -> list[httpx2.Response]:
    """A deployment whose runs would execute a command, and a run of it."""
    flow = api.post("flows/", json={"name": "stranger"}, **how)
    answers = [flow]
    for variables in (
        {"command": f"touch {marker}"},
        {"env": {"PYTHONSTARTUP": str(marker)}},
        {"env.PYTHONSTARTUP": str(marker)},
        {"working_dir": str(marker.parent)},
    ):
        body = {
            "name": "theirs",
            "flow_id": flow.json()["id"] if flow.is_success else "0" * 32,
            "work_pool_name": local_prefect.WORK_POOL,
            "job_variables": variables,
        }
        answers.append(api.post("deployments/", json=body, **how))
    return answers


def test_command_of_a_stranger_is_not_run(here: PrefectHere, tmp_path: Path) -> None:
    marker = tmp_path / "made"
    with httpx2.Client(base_url=here.access.url) as stranger:
        for how in ({}, {"headers": {"origin": EVIL, "content-type": "text/plain"}}):
            assert {one.status_code for one in attack(stranger, marker, **how)} <= {401, 403}
    assert not marker.exists()


def test_command_of_who_has_the_login_is_refused_too(here: PrefectHere, tmp_path: Path) -> None:
    marker = tmp_path / "made"
    flow, *tries = attack(here.api, marker)
    assert flow.is_success
    assert [one.status_code for one in tries] == [422] * len(tries), [one.text for one in tries]
    ours = here.deployment("reinforcement/reinforce")["id"]
    for variables in ({"command": f"touch {marker}"}, {"env": {"A": "b"}}):
        body = {"job_variables": variables, "state": {"type": "SCHEDULED"}}
        run = here.api.post(f"deployments/{ours}/create_flow_run", json=body)
        assert run.status_code == 422, run.text
    assert not marker.exists()


def test_changes_need_the_token_against_forged_requests(here: PrefectHere) -> None:
    user, _, password = read_login(here.settings.home).partition(":")
    url = f"{here.access.url}/flows/"
    forged = httpx2.post(url, json={"name": "forged"}, auth=(user, password))
    assert forged.status_code == httpx2.codes.FORBIDDEN
    settings = httpx2.get(f"http://127.0.0.1:{here.port}/ui-settings").json()
    assert (settings["csrf_enabled"], settings["auth"]) == (True, "BASIC")


def test_misspelt_parameter_is_refused_before_a_run_exists(here: PrefectHere) -> None:
    for flow in (
        "agent-training/whole-chain",
        "realtime-cycle/every-5-hours",
        "reinforcement/reinforce",
    ):
        deployment = here.deployment(flow)["id"]
        body = {"parameters": {"recipie": "nano"}, "state": {"type": "SCHEDULED"}}
        answer = here.api.post(f"deployments/{deployment}/create_flow_run", json=body)
        assert answer.status_code == httpx2.codes.CONFLICT, answer.text
        assert "recipie" in answer.text


def test_login_is_nowhere_but_in_its_file_and_in_memory(here: PrefectHere) -> None:
    home, login = here.settings.home, read_login(here.settings.home)
    assert stat.S_IMODE((home / LOGIN_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "prefect").stat().st_mode) == 0o700
    secret = login.partition(":")[2].encode()
    holders = [path for path in home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert holders == [home / LOGIN_FILE]
    for pid in family(home=home):
        assert secret.decode() not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.slow
@pytest.mark.nightly
def test_old_template_of_a_pool_is_replaced(here: PrefectHere) -> None:
    pool = f"work_pools/{local_prefect.WORK_POOL}"
    template = here.api.get(pool).raise_for_status().json()["base_job_template"]
    properties = {**template["variables"]["properties"], "command": {"type": "string"}}
    old = {
        "job_configuration": {**template["job_configuration"], "command": "{{ command }}"},
        "variables": {"type": "object", "properties": properties},
    }
    here.api.patch(pool, json={"base_job_template": old}).raise_for_status()
    local_prefect.deploy(here.environment, local_prefect.RecipeChoice(name="nano"))
    assert here.api.get(pool).json()["base_job_template"] == template


def test_server_of_another_home_is_not_joined(here: PrefectHere, tmp_path: Path) -> None:
    other = Settings(home=tmp_path / "other", prefect_port=here.port)
    assert is_own_server(here.port, here.settings.home)
    assert not is_own_server(here.port, other.home)
    assert local_prefect.named_server(other) == ServerAccess(here.access.url)
    with local_prefect.server(other, local_prefect.Console(stderr=True)) as (told, await_server):
        await_server()
        assert told["PREFECT_API_URL"] != here.access.url
        access = ServerAccess(told["PREFECT_API_URL"], told["PREFECT_API_AUTH_STRING"])
        with open_api(access) as api:
            assert api.post("deployments/count", json={}).raise_for_status().json() == 0
        refused = httpx2.post(f"{here.access.url}/flows/", json={"name": "x"})
        assert refused.status_code in (401, 403)


def test_login_that_others_may_read_is_refused(tmp_path: Path) -> None:
    first = read_login(tmp_path)
    assert read_login(tmp_path) == first
    (tmp_path / LOGIN_FILE).chmod(0o640)
    with pytest.raises(ConfigError, match=r"-rw-r-----.*wanted -rw-------"):
        read_login(tmp_path)
    assert read_login(tmp_path / "another") != first


def test_first_commands_at_once_draw_one_login(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from ostinato.flows.stages.server_access import read_login;"
        "print(read_login(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "home")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=240)[0] for process in started}) == 1
