"""The doctor: each check says ok, or what was seen, what is wanted and how to mend it."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands import doctor
from ostinato.flows.operating import local_prefect
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.infra.platform.settings import Settings

_GIGABYTE = 2**30


def _settings(tmp_path: Path, **changes: object) -> Settings:
    return Settings.model_validate({"home": tmp_path / "home", **changes})


def test_python_outside_the_supported_range_is_named() -> None:
    assert doctor.check_python((3, 11)).ok
    old = doctor.check_python((3, 10))
    assert (old.ok, old.detail) == (False, "3.10, wanted 3.11 or 3.12")
    assert "Python 3.11" in old.fix


def test_brackets_of_a_fix_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        doctor.Check(name="gpu", ok=False, detail="[/opt] lacks it", fix="pip install '.[gpu]'")
    ]
    monkeypatch.setattr(doctor, "run_checks", lambda settings, deep: found)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 1
    assert "[/opt] lacks it" in shown.output
    assert "fix: pip install '.[gpu]'" in shown.output


def test_program_reports_its_last_line_either_way() -> None:
    assert doctor.check_program("x", "print('first'); print('fine')", "mend").detail == "fine"
    broken = doctor.check_program("x", "import no_such_library", "mend")
    assert (broken.ok, broken.fix) == (False, "mend")
    assert "no_such_library" in broken.detail


def test_ray_wants_memory() -> None:
    assert doctor.check_ray(8 * _GIGABYTE, _GIGABYTE).ok
    short = doctor.check_ray(_GIGABYTE, _GIGABYTE)
    assert not short.ok
    assert "1.0 GiB of memory free, wanted 3.0 GiB" in short.detail


def test_sandbox_really_starts_a_box() -> None:
    assert doctor.check_sandbox().ok


def test_disk_is_measured_above_a_home_that_is_not_there(tmp_path: Path) -> None:
    home = tmp_path / "not" / "made"
    assert doctor.check_disk(home, 0).ok
    full = doctor.check_disk(home, 10**18)
    assert not full.ok
    assert "wanted 931322574.6 GiB" in full.detail
    assert not home.exists()


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


@pytest.mark.parametrize("program", ["gateway_process", "dashboard.process"])
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
