"""The doctor: each check says ok, or what was seen, what is wanted and how to mend it."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands import doctor
from ostinato.flows.commands.doctor import Check, estimate_memory
from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stages.server_access import ServerAccess, open_api, read_login
from ostinato.infra.platform.cluster.services import ServiceGroup, find_free_port
from ostinato.infra.platform.settings import Settings
from ostinato.models.decode.config import DecodingConfig, Precision
from ostinato.models.weight_shapes import num_parameters
from tests.fakes.prefect_here import wait_until

_GIGABYTE = 2**30


def _settings(tmp_path: Path, **changes: object) -> Settings:
    return Settings.model_validate({"home": tmp_path / "home", **changes})


def test_python_outside_the_supported_range_is_named() -> None:
    assert doctor.check_python((3, 11)).ok
    old = doctor.check_python((3, 10))
    assert (old.ok, old.detail) == (False, "3.10, wanted 3.11 or 3.12")
    assert "Python 3.11" in old.fix


def test_brackets_of_a_fix_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check(name="gpu", ok=False, detail="[/opt] lacks it", fix="pip install '.[gpu]'")]
    monkeypatch.setattr(doctor, "run_checks", lambda settings, recipe, deep: found)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 1
    assert "[/opt] lacks it" in shown.output
    assert "fix: pip install '.[gpu]'" in shown.output


def test_program_reports_its_last_line_either_way() -> None:
    assert doctor.check_program("x", "print('first'); print('fine')", "mend").detail == "fine"
    broken = doctor.check_program("x", "import no_such_library", "mend")
    assert (broken.ok, broken.fix) == (False, "mend")
    assert "no_such_library" in broken.detail


def test_vllm_is_asked_for_where_the_recipe_decodes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(name: str, program: str, fix: str) -> Check:
        asked.append(name)
        return Check(name=name, ok=False, detail="no", fix=fix)

    monkeypatch.setattr(doctor, "check_program", note)
    recipe = load_recipe("miniature")
    assert "vllm" not in {check.name for check in doctor.run_checks(_settings(tmp_path), recipe)}
    there = recipe.model_copy(update={"decoding": DecodingConfig(engine="vllm")})
    [check] = [c for c in doctor.run_checks(_settings(tmp_path), there) if c.name == "vllm"]
    assert not check.ok
    assert "extra `vllm`" in check.fix
    assert asked.count("vllm") == 1


def test_ray_wants_memory() -> None:
    assert doctor.check_ray(8 * _GIGABYTE, _GIGABYTE).ok
    short = doctor.check_ray(_GIGABYTE, _GIGABYTE)
    assert not short.ok
    assert "1.0 GiB of memory free, wanted 3.0 GiB" in short.detail


def test_sandbox_really_starts_a_box() -> None:
    assert doctor.check_sandbox().ok


def _strange_machine(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


UBUNTU = {
    "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
    "proc/sys/kernel/unprivileged_userns_clone": "1\n",
    "proc/sys/user/max_user_namespaces": "127442\n",
    "proc/self/status": "Name:\tpython\nSeccomp:\t0\nSeccomp_filters:\t0\n",
}
DOCKER = {".dockerenv": "", "proc/self/status": "Seccomp:\t2\nSeccomp_filters:\t1\n"}
APPARMOR_FIX = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
DOCKER_FIX = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"


@pytest.mark.parametrize(
    ("files", "says", "is_silent_about"),
    [
        (UBUNTU, [APPARMOR_FIX, "60-ostinato.conf"], ["--security-opt", "userns_clone"]),
        (DOCKER, ["the container's seccomp filter", DOCKER_FIX], ["sysctl"]),
        ({**UBUNTU, **DOCKER}, ["on the container's host", APPARMOR_FIX, DOCKER_FIX], ["Debian"]),
        (
            {"proc/sys/kernel/unprivileged_userns_clone": "0\n"},
            ["kernel.unprivileged_userns_clone=1"],
            ["apparmor", "--security-opt"],
        ),
        ({"run/.containerenv": ""}, ["masked /proc", "systempaths=unconfined"], ["sysctl"]),
        ({}, ["max_user_namespaces", "apparmor", DOCKER_FIX], []),
    ],
    ids=["Ubuntu", "Docker", "Docker on Ubuntu", "Debian", "Podman", "nothing seen"],
)
def test_fix_of_a_refused_box_is_the_one_for_the_machine(
    tmp_path: Path, files: dict[str, str], says: list[str], is_silent_about: list[str]
) -> None:
    fix = doctor.how_to_allow_boxes(_strange_machine(tmp_path, files))
    assert [word for word in says if word not in fix] == []
    assert [word for word in is_silent_about if word in fix] == []


def test_memory_is_compared_with_what_the_recipe_needs() -> None:
    nano, large = load_recipe("nano"), load_recipe("qwen3_30b_a3b")
    assert doctor.check_memory(nano, 8 * _GIGABYTE).ok
    short = doctor.check_memory(large, 8 * _GIGABYTE)
    assert not short.ok
    assert "8.0 GiB free for recipe qwen3_30b_a3b, wanted" in short.detail
    assert "GiB of it ranks of" in short.detail
    assert doctor.check_memory(large, 8 * _GIGABYTE, has_gpu=True).ok


def test_engines_of_bf16_need_half_the_memory_for_weights() -> None:
    nano = load_recipe("nano")
    many = nano.reinforcement.model_copy(update={"engine_replicas": 100})  # engines take most
    recipe = nano.model_copy(update={"reinforcement": many})
    halved = recipe.model_copy(update={"decoding": DecodingConfig(precision=Precision.BF16)})
    saved = estimate_memory(recipe)["engines"] - estimate_memory(halved)["engines"]
    copies = 3  # packed, as they came, the next version's
    assert saved == 2 * copies * num_parameters(recipe.model) * recipe.reinforcement.engine_replicas


def test_disk_is_measured_above_a_home_that_is_not_there(tmp_path: Path) -> None:
    home = tmp_path / "not" / "made"
    assert doctor.check_disk(home, 0).ok
    full = doctor.check_disk(home, 10**18)
    assert not full.ok
    assert "wanted 931322574.6 GiB" in full.detail
    assert not home.exists()


def test_disk_is_compared_with_what_the_recipe_may_fill(tmp_path: Path) -> None:
    large = doctor.check_disk(tmp_path, 0, load_recipe("kimi_k2"))
    assert not large.ok
    assert "for recipe kimi_k2" in large.detail


@contextlib.contextmanager
def _prefect_server(home: Path, **environment: str) -> Iterator[httpx2.Client]:
    """The API of a home's server, with a deployment that is due every minute."""
    settings, port = _settings(home), find_free_port()
    told = {**local_prefect.prefect_environment(settings, port), **environment}
    with ServiceGroup() as group:
        group.start(local_prefect.server_service(settings, port, told))
        login = told["PREFECT_SERVER_API_AUTH_STRING"]
        with open_api(ServerAccess(told["PREFECT_API_URL"], login), 120) as api:
            flow = _make(api, "flows/", {"name": "toy"})
            schedule = {"schedule": {"interval": 60.0}, "active": True}
            body = {"name": "every minute", "flow_id": flow["id"], "schedules": [schedule]}
            _make(api, "deployments/", body)
            yield api


def _make(api: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the server has made of `body`. It says 503 while its database is busy; twice makes one."""
    made = wait_until(path, lambda: (answer := api.post(path, json=body)).is_success and answer, 60)
    return made.json()


@pytest.mark.parametrize("schedules", [True, False])
@pytest.mark.nightly
def test_scheduler_that_does_not_schedule_is_named(tmp_path: Path, schedules: bool) -> None:
    enabled = {"PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": str(schedules).lower()}
    with _prefect_server(tmp_path, **enabled) as api:
        url, login = str(api.base_url), read_login(_settings(tmp_path).home)
        if schedules:
            wait_until("a run", lambda: api.post("flow_runs/count", json={}).json(), 120)
        now = doctor.check_schedules(url, login)
        later = doctor.check_schedules(url, login, now=time.time() + 600)
    assert now.ok, "a deployment of a moment ago may wait"
    assert later.ok == schedules
    if not schedules:
        assert "no scheduled run of every minute 10 min after the schedule was set" in later.detail
        assert "SCHEDULER_ENABLED" in later.fix


def test_server_with_a_login_is_asked_with_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, login = _settings(tmp_path), "me:secret"
    with _prefect_server(tmp_path, PREFECT_SERVER_API_AUTH_STRING=login) as api:
        monkeypatch.setenv("PREFECT_API_URL", str(api.base_url))
        monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
        refused = doctor.check_schedules(*local_prefect.named_server(settings))
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", login)
        answered = doctor.check_schedules(*local_prefect.named_server(settings))
    assert not refused.ok
    assert "401" in refused.detail
    assert answered.ok
    assert "1 deployments" in answered.detail


def test_server_that_is_not_there_schedules_nothing_and_need_not() -> None:
    assert doctor.check_schedules(f"http://127.0.0.1:{find_free_port()}/api/").ok


def test_busy_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        busy = doctor.check_port("port of gateway", port, "OSTINATO_GATEWAY_PORT")
    free = doctor.check_port("port of gateway", port, "OSTINATO_GATEWAY_PORT")

    assert free.ok
    assert not busy.ok
    assert f"{port} is busy (process" in busy.detail
    assert "OSTINATO_GATEWAY_PORT" in busy.fix


def test_database_and_object_store_that_work(tmp_path: Path) -> None:
    settings = _settings(tmp_path)

    assert doctor.check_database(settings).ok
    assert doctor.check_object_store(settings).ok


@pytest.mark.parametrize(
    "changes",
    [
        {"ledger_url": "postgresql://nobody@127.0.0.1:9/none"},
        {"ledger_url": "mysql://host/database"},
        {"ledger_url": "sqlite:////proc/nowhere/ledger.db"},
    ],
)
def test_unreachable_database_says_what_was_tried(tmp_path: Path, changes: dict[str, str]) -> None:
    check = doctor.check_database(_settings(tmp_path, **changes))

    assert not check.ok
    assert changes["ledger_url"].partition(":")[0] in check.detail
    assert "OSTINATO_LEDGER_URL" in check.fix


def test_unwritable_object_store_says_what_was_tried(tmp_path: Path) -> None:
    check = doctor.check_object_store(_settings(tmp_path, object_store_url="file:///proc/nowhere"))

    assert not check.ok
    assert "file:///proc/nowhere" in check.detail


@pytest.mark.parametrize("program", ["gateway_process", "dashboard.server"])
def test_port_of_a_service_of_ours_is_fine(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = local_prefect.dashboard(_settings(tmp_path), {}).command
    if program == "gateway_process":
        command = local_prefect.gateway(
            _settings(tmp_path), {}, RecipeChoice(name="nano"), "nano"
        ).command
    holder = f"process 7: {' '.join(command)}"
    assert program in holder
    monkeypatch.setattr(doctor, "_describe_process", lambda process: holder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert doctor.check_port("port", port, "OSTINATO_X_PORT").ok
