"""What a command refuses before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.errors import ConfigError


def test_a_base_that_nobody_imported_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    ran = CliRunner().invoke(app, ["run", "reinforcement", "--recipe", "kimi_k2"])
    assert isinstance(ran.exception, ConfigError)
    assert "'checkpoint/kimi_k2@1' is not in the ledger" in str(ran.exception)
    assert "ostinato import" in str(ran.exception)
    assert not (tmp_path / "prefect").exists()
