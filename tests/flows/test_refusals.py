"""Command line: a wrong name is refused before a server or a stage is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--recipe", "nope"], "recipe 'nope' not found"),
        (
            ["demo", "--set", "learning.nope=1"],
            r"(?s)--set learning.nope=1 has 1 .*nope: unknown key",
        ),
        (["evaluate", "--checkpoint", "candidate/nano@99"], "'candidate/nano@99' is not in"),
        (["evaluate", "--checkpoint", "champion"], "'nano' has no checkpoint"),
        (["evaluate"], "recipe 'nano' has no trained checkpoint"),
        (["problems", "probe"], "recipe 'nano' has no trained checkpoint"),
        (
            ["problems", "probe", "--checkpoint", "reinforced/nano@9"],
            "nano@9' is not in the ledger",
        ),
        (["replay", "--run", "nano-seed9"], "no RL run with a finished step"),
    ],
)
def test_wrong_name_starts_nothing(arguments: list[str], says: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not (home / "prefect").exists()


@pytest.mark.parametrize("command", ["status", "doctor", "demo", "keys list", "import x", "up"])
def test_home_that_is_a_file_is_named_by_each_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match=r"HOME is '.*/file/home': .*/file is not a folder"):
        CliRunner().invoke(app, command.split(), catch_exceptions=False)
