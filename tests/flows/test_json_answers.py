"""--json: one JSON value alone on standard output, the same exit code, whatever the command starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ostinato.flows.cli import app
from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.infra.platform.cluster.services import find_free_port
from ostinato.infra.platform.settings import Settings
from tests.fakes.trained_home import fill_home

SCRIPT = Path(sys.executable).with_name("ostinato")
# what they do is seen, or goes on until Ctrl-C
WITHOUT_ANSWER = {"chat", "dashboard", "deploy", "deploy-files", "down", "sandboxes serve", "up"}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_whose_result_a_script_wants_has_it() -> None:
    without = {
        name
        for name, command in commands(typer.main.get_command(app))
        if not any("--json" in option.opts for option in command.params)
    }
    assert without == WITHOUT_ANSWER


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A home that has trained. Nobody listens on its ports."""
    ports = {name: find_free_port() for name in ("prefect_port", "gateway_port", "dashboard_port")}
    home = tmp_path_factory.mktemp("home")
    settings = Settings.model_validate({"home": home, "minimum_free_disk_bytes": 0, **ports})
    fill_home(settings)
    return settings


def typed(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings.to_environment()}
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ("recipe list", dict),
        ("status", list),
        ("keys add acme", dict),
        ("cycle show --line tests", list),
        ("plan --recipe nano --gpus 2 --chip h200", dict),
    ],
)
@pytest.mark.sampled(3)
def test_standard_output_is_one_value(settings: Settings, arguments: str, kind: type) -> None:
    answer = typed(settings, *arguments.split(), "--json")
    assert answer.returncode == 0, answer.stderr
    assert isinstance(json.loads(answer.stdout), kind)


def test_refusal_has_its_exit_code_and_says_nothing_on_standard_output(settings: Settings) -> None:
    answers = [
        typed(settings, "cycle", "skip", "--line", "toy", *more) for more in ([], ["--json"])
    ]
    assert [answer.returncode for answer in answers] == [2, 2]
    assert answers[1].stdout == ""
    assert "has no open cycle" in answers[1].stderr


CHATTY = """
import subprocess, sys, typer
from ostinato.flows.commands.answers import CommandResult, answering

app = typer.Typer()

@app.command()
@answering
def chatty(times: int = 1) -> CommandResult:
    print("from here")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    return CommandResult({"times": times, "loss": float("nan")}, lambda: print("for people"), 7)

app()
"""


def test_what_a_command_and_its_children_print_goes_to_standard_error() -> None:
    command = [sys.executable, "-c", CHATTY, "--times", "3"]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert plain.returncode == told.returncode == 7
    assert json.loads(told.stdout) == {"times": 3, "loss": None}
    assert {"from here", "from a child"} <= set(told.stderr.splitlines())
    assert plain.stdout.splitlines()[-1] == "for people"


def test_help_of_a_command_keeps_its_own_options() -> None:
    @answering
    def command(times: int = 1) -> CommandResult:
        """Does something."""
        return CommandResult(times, lambda: None)

    only = typer.Typer()
    only.command()(command)
    names = [option.name for option in typer.main.get_command(only).params]
    assert names[:2] == ["times", "as_json"]
