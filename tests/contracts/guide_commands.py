"""What a command of a guide must be, by its program: read by the program's own parser, and made of names that exist."""

import functools
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer.main
from packaging.requirements import Requirement
from typer.core import TyperGroup

from ostinato.flows import cli
from ostinato.flows.chat import command as chat
from ostinato.flows.commands.launching import make_options
from ostinato.flows.commands.planning import parse_degrees
from ostinato.flows.operating.local_prefect import HEARTBEAT, WORK_POOL, flow_names
from ostinato.flows.recipe import load_recipe
from ostinato.infra import deploy
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.planning.inputs import load_inputs
from tests.architecture.source import ROOT
from tests.contracts.guide_blocks import Command, fill

SHAPE_ONLY = {
    "cat": "reads a file that `ostinato up` makes",
    "cd": "the shell's own",
    "claude": "Claude Code is no requirement; tests/contracts/test_foreign_agents.py runs it",
    "curl": "test_guides.py compares its requests with the schemas of gateway and Prefect",
    "cut": "in the pipe that draws a token",
    "git": "clones what has no address yet; packs any repository",
    "head": "in the pipe that draws a token",
    "ray": "starts a node of a cluster; tests/faults/test_two_nodes.py starts two",
    "sha256sum": "in the pipe that draws a token",
    "ssh": "needs another machine",
    "umask": "the shell's own",
}
"""Programs whose arguments are not read here, each with its reason."""
WRAPPERS = ("docker", "sbatch", "torchrun")
"""Programs that start another one: theirs is checked, their own options are not."""


def check_command(command: Command) -> None:
    """AssertionError, or the error of the program's parser, for a command that would not run."""
    _check_variables(command)
    if not command.words:
        return
    check = CHECKS.get(command.program)
    assert check or command.program in SHAPE_ONLY, (
        f"{command.block}: no check of the program {command.program!r}"
    )
    if check:
        check(command)


def ostinato_words(command: Command) -> list[str] | None:
    """Arguments of `ostinato` in a command, also below a program that starts it, as the guide has them. None: there
    is no `ostinato`.
    """
    if command.program == "ostinato":
        return list(command.words[1:])
    if command.program in WRAPPERS and "ostinato" in command.words:
        return list(command.words[command.words.index("ostinato") + 1 :])
    return None


def _check_variables(command: Command) -> None:
    """Ours are settings, Prefect's are settings of the installed Prefect."""
    known = {f"OSTINATO_{name.upper()}" for name in Settings.model_fields}
    own = {name for name in command.variables if name.startswith("OSTINATO_")}
    assert own <= known, f"{command.block}: {sorted(own - known)} is no setting"
    theirs = {name for name in command.variables if name.startswith("PREFECT_")}
    assert theirs <= {HEARTBEAT, "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"}, command.block


def read_by(program: Any, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Names of the commands that typer finds, and every option and argument converted. Runs nothing."""
    context = program.make_context("ostinato", list(words))
    path: list[str] = []
    while isinstance(program, TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, program, rest = program.resolve_command(context, rest)
        assert program is not None
        assert name is not None
        path.append(name)
        context = program.make_context(name, rest, parent=context)
    extra = {"extra": context.args} if context.args else {}
    return path, context.params | extra


@functools.cache
def _programs() -> tuple[Any, Any]:
    """The command line, and that of `chat`, which is a program of its own."""
    return typer.main.get_command(cli.app), typer.main.get_command(chat.app)


def check_ostinato(command: Command) -> None:
    """Reads the arguments, and loads what they name: recipe with settings, flow, stages, chip, endpoint."""
    words = ostinato_words(command)
    assert words is not None, f"{command.block}: {command} starts no `ostinato`"
    own, of_chat = _programs()
    path, values = read_by(own, fill(words))
    if path == ["chat"]:
        path, values = [], read_by(of_chat, fill(words[1:]))[1]
    if isinstance(values.get("recipe"), str):
        overrides = values.get("settings") or values.get("overrides") or ()
        load_recipe(values["recipe"], seed=values.get("seed"), overrides=overrides)
    make_options(None, values.get("keep"), values.get("rebuild"))
    if path == ["run"]:
        assert values["flow"].replace("-", "_") in flow_names(), values["flow"]
        assert (values["flow"] == "sft") == (values["data"] is not None), words
    if path == ["plan"]:
        parse_degrees(values["degrees"] or ())
        load_inputs(values["chip"])
    if values.get("endpoint"):
        Endpoint(url=values["endpoint"], model=values["model"], key_env=values["key_env"])


def check_wrapper(command: Command) -> None:
    """Files of ours that it names, and the command of ours that it starts."""
    text = " ".join(command.words)
    for name in re.findall(r"\bdeploy/([\w.]+)", text):
        assert (deploy.FOLDER / name).is_file(), name
    if command.words[1:2] == ("run",) and command.program == "docker":
        assert ostinato_words(command)
    if ostinato_words(command):
        check_ostinato(command)


def check_kubectl(command: Command) -> None:
    """Files and names are those of the manifest."""
    manifest = (deploy.FOLDER / "rayjob.yaml").read_text()
    for file in (word for word in command.words if word.startswith("deploy/")):
        assert (deploy.FOLDER / file.removeprefix("deploy/")).is_file(), file
    for name in re.findall(r"\bostinato-[a-z]+\b", " ".join(command.words)):
        assert f"name: {name}\n" in manifest, name


def check_python(command: Command) -> None:
    """`python -m MODULE` exists and has the options. `python -c CODE` runs, so it must be short."""
    option, what, *words = fill(command.words[1:])
    if option == "-c":
        subprocess.run([sys.executable, "-c", what, *words], check=True, capture_output=True)
        return
    assert option == "-m", f"{command.block}: {command}"
    assert importlib.util.find_spec(what) is not None, what
    read_options(what, words)


@functools.cache
def _help_of(module: str) -> str:
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_options(module: str, words: Sequence[str]) -> None:
    """Options that the module's `--help` lists, with values that it lists."""
    told = _help_of(module)
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option.startswith("-"):
            assert re.search(rf"{option}\b", told), f"{module}: {option}"
            choices = re.search(rf"{option} \{{([^}}]*)\}}", told)
            assert not choices or value in choices[1].split(","), f"{module}: {option} {value}"


def check_make(command: Command) -> None:
    """Targets, and variables that the Makefile reads."""
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        known = rf"^{name} \?=" if is_variable else rf"^{name}:"
        assert re.search(known, makefile, re.MULTILINE), f"{command.block}: {word} in {command}"


def check_pip(command: Command) -> None:
    """Extras of ours exist, a pinned version is the tested one, and files are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    words = command.words[1:]
    assert words[0] == "install", f"{command.block}: {command}"
    for option, value in itertools.pairwise(words):
        if option in ("-c", "-r"):
            assert (ROOT / value).is_file(), value
    for word in words[1:]:
        if extras := re.fullmatch(r"(?:\.|ostinato)\[(.*)\]", word):
            unknown = set(extras[1].split(",")) - project["optional-dependencies"].keys()
            assert not unknown, f"{command.block}: extras {sorted(unknown)}"
        elif "==" in word:
            assert str(Requirement(word)) in pins, f"{command.block}: {word} is not the tested pin"


def check_prefect(command: Command) -> None:
    """The worker of our pool, which is the only command of Prefect's in a block."""
    assert command.words[1:] == ("worker", "start", "--pool", WORK_POOL), command.block


def check_copy(command: Command) -> None:
    """What is copied is in the repository."""
    assert (ROOT / next(word for word in command.words[1:] if word[0] != "-")).exists()


CHECKS: dict[str, Callable[[Command], None]] = {
    "cp": check_copy,
    "kubectl": check_kubectl,
    "make": check_make,
    "ostinato": check_ostinato,
    "pip": check_pip,
    "prefect": check_prefect,
    "python": check_python,
    "python3": check_python,
    **dict.fromkeys(WRAPPERS, check_wrapper),
}


def own_recipes(text: str) -> dict[str, str]:
    """Recipes that a guide's text lays out, by the file that a comment names."""
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    named = ((re.search(r"# (\w+\.toml)", block), block) for block in blocks)
    return {name[1]: block for name, block in named if name}


def lay_recipes(folder: Path, guide: str) -> None:
    """The recipe files that commands of a guide name: its own, or a small one."""
    plain = {"my.toml": 'extends = "qwen3_30b_a3b"\nname = "my"\n'}
    for name, text in (plain | own_recipes((ROOT / guide).read_text())).items():
        (folder / name).write_text(text)
