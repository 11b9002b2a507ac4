"""`ostinato recipe`: the shipped recipes and their settings. `ostinato try`: the tool-call dialect and edit form that a
recipe for an imported model should name.
"""

import json
from typing import Annotated

import typer
from rich.console import Console

from ostinato.flows.commands.answers import CommandResult, answering, launch_flow
from ostinato.flows.commands.launching import RecipeOption, SeedOption, SetOption, make_options
from ostinato.flows.recipe import load_recipe, recipe_names
from ostinato.flows.recipe_differences import differences, settings_of
from ostinato.flows.recipe_text import describe_recipe
from ostinato.flows.stages.checkpoints import refuse_unknown
from ostinato.infra.agent.extensions import DIALECTS
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.settings import load_settings

recipes = typer.Typer(no_args_is_help=True, help="Shipped recipes and their settings.")


@recipes.command("list")
@answering
def list_recipes() -> CommandResult:
    """Lists the shipped recipes with their descriptions."""
    found = {name: load_recipe(name).description for name in recipe_names()}

    def show() -> None:
        for name, description in found.items():
            typer.echo(f"{name:<22} {description}")

    return CommandResult(found, show)


@recipes.command("show")
@answering
def show_recipe(
    recipe: Annotated[str, typer.Argument(help="name of a recipe, or the path of a TOML file")],
    seed: SeedOption = None,
    settings: SetOption = None,
) -> CommandResult:
    """Prints every setting of a recipe with its value and description."""
    loaded = load_recipe(recipe, seed=seed, overrides=settings or ())

    def show() -> None:
        Console().out(describe_recipe(loaded), highlight=False)

    return CommandResult(loaded, show)


@recipes.command("diff")
@answering
def diff_recipes(
    first: Annotated[
        str, typer.Argument(help="name of a recipe, path of a TOML file, or a run: nano-seed0/ID")
    ],
    second: Annotated[str, typer.Argument(help="another one")],
) -> CommandResult:
    """Prints the settings in which two recipes or runs differ, by section and key."""
    home = load_settings().home
    found = differences(settings_of(first, home), settings_of(second, home))

    def show() -> None:
        typer.echo(f"{len(found)} settings differ: {first}, {second}")
        for key, values in found.items():
            typer.echo(f"{key:<44} {', '.join(map(json.dumps, values))}")

    return CommandResult(found, show)


@answering
def try_formats(
    checkpoint: Annotated[
        str, typer.Argument(help="an imported model, or one trained from it: kind/name@version")
    ],
    dialects: Annotated[
        list[str] | None,
        typer.Option("--dialect", help="one more tool-call dialect to try; repeatable"),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="attempts in each format; the recipe's when absent", min=1)
    ] = None,
    recipe: RecipeOption = "short_repairs",
    settings: SetOption = None,
) -> CommandResult:
    """Tries the tool-call dialects and edit forms that a model may know, and recommends one. A recipe with a
    foreign harness program tries that program. Trains nothing.
    """
    # There is no --seed option, because with another seed the shipped problems would have to be rebuilt.
    with boundary(ConfigError, "--dialect"):
        DIALECTS.refuse_unknown(dialects or ())
    amount = [] if problems is None else [f"format_trial.problems={problems}"]
    options = make_options([*(settings or ()), *amount], None, None)
    loaded = load_recipe(recipe, overrides=options.overrides)
    refuse_unknown(load_settings(), loaded, [checkpoint])
    parameters = {"checkpoint": checkpoint, "dialects": dialects or []}
    result = launch_flow("format_trial", recipe, None, options, parameters)
    return CommandResult({"flow": "format_trial", "result": result})
