"""What the tests of infra/deploy read: its files, and the commands, options and variables that exist."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer.main
from kubernetes_asyncio.client import models
from ray.scripts import scripts as ray_scripts
from typer.core import TyperGroup

from ostinato.flows import cli
from ostinato.flows.operating.local_prefect import flow_names
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.settings import PREFIX, Settings

ROOT = Path(__file__).parents[4]
# read by prefect.yaml, not by settings
OUTSIDE_SETTINGS = {"OSTINATO_REPOSITORY"}
PLAIN_TYPES = {"str": str, "int": int, "bool": bool, "float": float}


def run_checker(program: str, path: Path) -> str:
    """What a linter that lies beside this interpreter says of a file; empty when it finds nothing."""
    command = [str(Path(sys.executable).parent / program), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def refuse_unknown_variables(names: set[str]) -> None:
    """AssertionError when one that begins as ours is no setting."""
    known = {PREFIX + field.upper() for field in Settings.model_fields} | OUTSIDE_SETTINGS
    assert {name for name in names if name.startswith(PREFIX)} <= known


def refuse_unknown_command(line: str) -> None:
    """Parses a command line of ours without running it; its recipe and what it sets are loaded."""
    words = shlex.split(line)
    assert words[0] == "ostinato"
    command, rest = typer.main.get_command(cli.app), words[1:]
    while isinstance(command, TyperGroup):
        assert rest, line
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context(line, rest) as context:
        values = context.params
    if "flow" in values:
        assert values["flow"].replace("-", "_") in flow_names()
    if "recipe" in values:
        load_recipe(values["recipe"], overrides=values.get("settings") or ())


def ray_start_options() -> set[str]:
    """Long options of `ray start`, without their dashes."""
    return {
        name.removeprefix("--") for parameter in ray_scripts.start.params for name in parameter.opts
    }


def refuse_unknown_fields(value: Any, kind: str, place: str = "") -> None:
    """AssertionError when a manifest has a field that the type of Kubernetes' API lacks, or of a wrong kind."""
    if kind.startswith("list["):
        assert isinstance(value, list), place
        for index, item in enumerate(value):
            refuse_unknown_fields(item, kind[5:-1], f"{place}[{index}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), place
        assert all(isinstance(item, str) for item in value.values()), place
    elif kind in PLAIN_TYPES:
        assert isinstance(value, PLAIN_TYPES[kind]), f"{place} is {value!r}, wanted {kind}"
    elif kind != "object":
        model = getattr(models, kind)
        fields = {api: name for name, api in model.attribute_map.items()}
        assert isinstance(value, dict), place
        assert set(value) <= set(fields), f"{place}: {sorted(set(value) - set(fields))}"
        for name, item in value.items():
            refuse_unknown_fields(item, model.openapi_types[fields[name]], f"{place}.{name}")
