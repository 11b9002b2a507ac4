"""`ostinato keys`: issue, list, revoke."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["keys", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_key_is_issued_listed_and_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    assert "no key issued" in run("list")
    text = run("add", "acme", "--consent", "--tokens-per-day", "900").strip()
    (row,) = json.loads(run("list", "--json"))
    assert (row["name"], row["consent"], row["tokens_per_day"]) == ("acme", True, 900)
    assert "digest" not in row
    assert text not in run("list")
    assert IssuedKeys(tmp_path).identify(text) is not None
    run("revoke", row["key_id"])
    assert IssuedKeys(tmp_path).identify(text) is None
    assert "revoked" in run("list")


def test_name_of_simulated_users_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="simulated"):
        run("add", "simulated")
