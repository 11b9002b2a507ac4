"""`ostinato plan`, and `ostinato run --dry-run`, which plans the run instead. Neither trains."""

from collections.abc import Sequence
from typing import Annotated

import typer

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.flows.commands.launching import SetOption, refuse_unknown_flow
from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.flows.stages.console import open_console, say
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.tasks.planning.inputs import find_gpus

# loaded by name, because the simulation imports half of the rollouts
PLANNING = "ostinato.flows.commands.planning"
TABLES = "ostinato.flows.commands.plan_tables"
ChipOption = Annotated[
    str | None,
    typer.Option(
        help="h100, h200, b200, b300, gb200 or gb300; this machine's, by nvidia-smi, when absent"
    ),
]


@answering
def plan(
    gpus: Annotated[
        int,
        typer.Option(
            help="GPUs in all: pretraining takes each, RL at most so many, engine replicas included",
            min=1,
        ),
    ],
    chip: ChipOption = None,
    recipe: Annotated[
        str, typer.Option(help="name of a shipped recipe, or the path of a TOML file")
    ] = "qwen3_30b_a3b",
    settings: SetOption = None,
    degrees: Annotated[
        list[str] | None,
        typer.Option("--layout", help="degree of an axis: tensor=2; searched when absent"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="also build a rank without values and walk a step"),
    ] = False,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(help="price in any currency; adds prices to the GPU-hours", min=0),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(help="bounds on staleness to simulate, such as staleness=0,1,2,4"),
    ] = None,
) -> CommandResult:
    """Plans a recipe on a cluster: placement, layout, memory, step time. Trains nothing."""
    loaded = load_recipe(recipe, overrides=settings or ())
    chip = chip or find_gpus("--chip").chip
    price = price_per_gpu_hour
    return _answer(
        loaded, gpus, chip, degrees or (), is_dry_run=dry_run, price=price, what_if=what_if
    )


def dry_run_flow(flow: str, recipe: Recipe, gpus: int | None, chip: str | None) -> CommandResult:
    """The plan and the dry run of a recipe whose flow would be started. None: as many GPUs as this machine has,
    and their chip.
    """
    refuse_unknown_flow(flow)
    if gpus is None or chip is None:
        machine = find_gpus("--gpus NUMBER and --chip")
        gpus, chip = gpus or machine.gpus, chip or machine.chip
    return _answer(recipe, gpus, chip, (), is_dry_run=True)


def _answer(
    recipe: Recipe,
    gpus: int,
    chip: str,
    degrees: Sequence[str],
    *,
    is_dry_run: bool,
    price: float | None = None,
    what_if: str | None = None,
) -> CommandResult:
    """A plan as a command's result. The exit code is 2 if the dry run does not agree with it."""
    make = load_entry(f"{PLANNING}:plan_recipe")
    planned = make(recipe, gpus, chip, degrees, is_dry_run=is_dry_run, price=price, what_if=what_if)

    def show() -> None:
        load_entry(f"{TABLES}:show")(planned, open_console())

    if planned.complaint:
        say(planned.complaint)
    return CommandResult(planned, show, 2 if planned.complaint else 0)
