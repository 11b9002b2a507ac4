"""Settings: defaults under home, read from the environment, handed to children unchanged."""

import re
from pathlib import Path

import pytest

from ostinato.flows.operating.status.ledger import sqlite_file
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import PREFIX, check_home, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in load_settings().to_environment():
        monkeypatch.delenv(name, raising=False)


def test_urls_follow_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    settings = load_settings()

    assert settings.object_store_url == f"file://{tmp_path}/objects"
    assert settings.ledger_url.get_secret_value() == f"sqlite:///{tmp_path}/ledger.db"
    assert settings.cache_directory == tmp_path / "cache"


@pytest.mark.parametrize("name", ["c# work", "100%", "a+b@c:d", "ü"])
def test_a_home_with_characters_of_urls_keeps_everything_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    home = tmp_path / name / "home"
    monkeypatch.setenv("OSTINATO_HOME", str(home))
    settings = load_settings()
    open_object_store(settings).put_bytes("key", b"")
    open_ledger(settings).close()

    assert (home / "objects/key").is_file()
    assert sqlite_file(settings) == home / "ledger.db"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["why?", "a%41b", "%2F"])
def test_a_home_that_no_address_of_a_database_can_name_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / name))
    shown = re.escape(name)
    with pytest.raises(ConfigError, match=rf"OSTINATO_HOME is '.*{shown}'.*wanted a path without"):
        load_settings()


def test_a_home_whose_name_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", "/data/\udcff")
    with pytest.raises(ConfigError, match="OSTINATO_HOME is"):
        load_settings()


def test_a_home_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", "~no-such-user/data")
    with pytest.raises(ConfigError, match="OSTINATO_HOME is '~no-such-user/data'"):
        load_settings()


@pytest.mark.parametrize("url", ["file:///data#1/objects", "file:///data?1", "s3://bucket/a#b"])
def test_a_store_whose_address_would_be_cut_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"object store URL is .*%23"):
        ObjectStore.from_url(url)


def test_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_settings().home == tmp_path / ".ostinato"


def test_environment_of_a_child_loads_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    monkeypatch.setenv("OSTINATO_S3_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("OSTINATO_GATEWAY_PORT", "9001")
    settings = load_settings()
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)

    assert load_settings() == settings
    assert settings.s3_secret_access_key is not None
    assert "secret" not in repr(settings).replace("secret_access_key", "")


def test_the_password_of_the_ledger_reaches_children_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "postgresql://user:hunter2@host/ledger"
    monkeypatch.setenv("OSTINATO_LEDGER_URL", url)
    settings = load_settings()
    shown = [repr(settings), str(settings), settings.model_dump_json(), f"{settings.ledger_url}"]
    assert [text for text in shown if "hunter2" in text] == []
    assert settings.to_environment()["OSTINATO_LEDGER_URL"] == url


@pytest.mark.parametrize(
    ("name", "value"), [("GATEWAY_PORT", "no"), ("GATEWAY_PORT", "70000"), ("CPU_LIMIT", "0")]
)
def test_wrong_value_names_variable_and_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)

    with pytest.raises(ConfigError, match=f"OSTINATO_{name} is '{value}'"):
        load_settings()


def test_home_on_a_place_that_even_root_cannot_write_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"OSTINATO_HOME is '/proc/x': /proc cannot be written \("
    ):
        check_home(Path("/proc/x"))
