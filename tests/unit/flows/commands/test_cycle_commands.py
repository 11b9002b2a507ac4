"""`ostinato cycle`: an open cycle is shown and ended by hand, and the next one begins after its window."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.realtime.config import GuardConfig
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from tests.fakes.open_canary import open_canary


def run(*arguments: str) -> str:
    answer = CliRunner().invoke(app, [*arguments, "--line", "mine"], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    with contextlib.closing(open_ledger(Settings(home=tmp_path))) as ledger:
        ledger.cycles.open(
            "mine-000000-f", line="mine", served="a@1", from_watermark=0, to_watermark=4, at=7.0
        )
        ledger.cycles.update("mine-000000-f", "promotion", {"outcome": "refused"})
    return tmp_path


def test_line_of_a_changed_recipe_is_meant(home: Path) -> None:
    changed = ["--recipe", "nano_long", "--set", 'serving.line="mine"']
    shown = CliRunner().invoke(app, ["cycle", "show", "--json", *changed], catch_exceptions=False)
    assert [row["line"] for row in json.loads(shown.stdout)] == ["mine"]


def test_a_line_that_nobody_has_is_refused(home: Path) -> None:
    arguments = ["cycle", "show", "--line", "mien"]
    with pytest.raises(ConfigError, match=r"--line mien .* wanted one of \['nano', 'tests'\]"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(ConfigError, match="--line mien is no serving line"):
        CliRunner().invoke(app, ["up", "--line", "mien"], catch_exceptions=False)


@pytest.mark.parametrize(("command", "outcome"), [("skip", "skipped"), ("close", "refused")])
def test_open_cycle_ends_by_hand(home: Path, command: str, outcome: str) -> None:
    [row] = json.loads(run("cycle", "show", "--json"))
    assert row["outcome"] is None
    assert outcome in run("cycle", command)
    [row] = json.loads(run("cycle", "show", "--json"))
    assert row["outcome"] == outcome
    with contextlib.closing(open_ledger(Settings(home=home))) as ledger:
        assert ledger.cycles.last_closed_watermark("mine") == 4
    with pytest.raises(ConfigError, match="no open cycle"):
        run("cycle", command)


def test_cycle_that_a_run_works_on_is_left_alone(home: Path) -> None:
    owners = home / "runs" / "nano-seed0" / "candidate-abc" / "owners"
    owners.mkdir(parents=True)
    (owners / "one").write_text(mark_process(os.getpid()).model_dump_json())
    with pytest.raises(ConfigError, match=f"process {os.getpid()} works in .*cancel it first"):
        run("cycle", "skip")


def test_champion_is_taken_back_by_hand(home: Path) -> None:
    with pytest.raises(ConfigError, match="serving line 'mine' has no champion"):
        run("cycle", "roll-back", "--reason", "slow")
    with contextlib.closing(open_ledger(Settings(home=home))) as ledger:
        for checkpoint in ("a", "b"):
            ledger.promotions.promote("mine", checkpoint, "card", "passed", 1.0)
    assert run("cycle", "roll-back", "--reason", "slow") == "mine: b withdrawn, a serves\n"
    with contextlib.closing(open_ledger(Settings(home=home))) as ledger:
        assert ledger.promotions.history("mine")[-1].reason == "slow"


def test_the_canary_of_the_line_is_shown_and_then_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    settings = Settings(home=tmp_path)
    open_canary(settings, sessions=120, age_seconds=3_000, users=("ann", "bob"))
    people = ["--set", "cycle.simulated_users=null"]

    def shown() -> str:
        command = ["cycle", "show", "--line", "toy", *people]
        return CliRunner().invoke(app, command, catch_exceptions=False).stdout

    opened = shown()
    assert "no cycle yet\ncanary of candidate/toy@2 since " in opened
    assert "1 of 5 looks done, not worse: " in opened
    assert "users are compared with users who behaved alike before the canary" in opened
    with contextlib.closing(open_ledger(settings)) as ledger:
        line = ServingLine(ledger, "toy", lambda: time.time() + 1e7)
        assert line.watch_canary(GuardConfig()) is None
    assert "canary of candidate/toy@2 ended: expire, undecided after " in shown()
    assert (
        json.loads(
            CliRunner().invoke(app, ["cycle", "show", "--line", "toy", "--json", *people]).stdout
        )
        == []
    )
