"""Options of flows on the command line, and the start of a flow in a child process."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from ostinato.flows.operating import local_prefect
from ostinato.flows.recipe import base_directory, load_recipe
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.cluster.services import run_foreground
from ostinato.infra.platform.errors import ConfigError, OstinatoError
from ostinato.infra.platform.extras import require_extra
from ostinato.infra.platform.settings import Settings

RecipeOption = Annotated[
    str, typer.Option(help="name of a shipped recipe, or the path of a TOML file")
]
SeedOption = Annotated[int | None, typer.Option(help="overrides the recipe's seed", min=0)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="overrides a setting, section.key=value; repeatable"),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(help="stage that reuses its newest artifact although code changed; repeatable"),
]
RebuildOption = Annotated[list[str] | None, typer.Option(help="stage to rebuild; repeatable")]


_TRAIN = (
    "agent_training",
    "continued_pretraining",
    "mtp_distillation",
    "reinforcement",
    "realtime_cycle",
    "sft",
)


def make_options(
    settings: list[str] | None, keep: list[str] | None, rebuild: list[str] | None
) -> RunOptions:
    """The options of a run. ConfigError lists all mistakes in them."""
    try:
        return RunOptions(
            overrides=tuple(settings or ()), keep=tuple(keep or ()), rebuild=tuple(rebuild or ())
        )
    except ValidationError as error:
        texts = (mistake["msg"].removeprefix("Value error, ") for mistake in error.errors())
        raise ConfigError("; ".join(texts)) from None


class FlowFailed(OstinatoError):
    """A flow ended without a result. Its process has printed the error."""

    def __init__(self, message: str, code: int = 3) -> None:
        super().__init__(message)
        self.code = code  # exit code of the process


def refuse_unknown_flow(flow: str) -> None:
    """Raises ConfigError, which lists the flows, for a name that none has."""
    known = local_prefect.flow_names()
    if flow not in known:
        raise ConfigError(f"no flow named {flow}; flows: {', '.join(known)}")


def run_flow_process(
    settings: Settings,
    flow: str,
    recipe: str,
    seed: int | None,
    options: RunOptions,
    parameters: Mapping[str, Any] | None = None,
    *,
    is_watched: bool = False,
) -> Any:
    """Runs a flow in a child process, with a Prefect server. Returns the flow's result as JSON values. Raises
    FlowFailed.
    """
    refuse_unknown_flow(flow)
    # a mistake in the recipe and a missing package are reported here, before anything starts
    loaded = load_recipe(recipe, seed=seed, overrides=options.overrides)
    if flow in _TRAIN:
        require_extra("train")
        if "start" not in (parameters or {}):
            base_directory(loaded.base_checkpoint)  # ConfigError when it is not imported
    console = Console(stderr=True)
    arguments = ["--recipe", recipe, "--options", options.model_dump_json()]
    arguments += ["--parameters", json.dumps(dict(parameters or {}))]
    arguments += [] if seed is None else ["--seed", str(seed)]
    arguments += ["--watch"] if is_watched else []
    with tempfile.TemporaryDirectory(prefix="ostinato-answer-") as directory:
        answer = Path(directory) / "answer.json"
        # `start` handles Ctrl-C while Prefect is still loading
        start, program = "ostinato.infra.platform.start", "ostinato.flows.commands.run_flow"
        command = [sys.executable, "-P", "-m", start, program, flow, *arguments]
        try:
            with local_prefect.server(settings, console) as (environment, await_server):
                environment = settings.to_environment() | environment
                code = run_foreground([*command, f"--answer={answer}"], environment, await_server)
        except KeyboardInterrupt:
            say("stopped; the same command continues from here")
            code = 130
        if code != 0:
            raise FlowFailed(f"flow {flow} of recipe {recipe}: exit code {code}", code)
        return json.loads(answer.read_bytes())
