"""`ostinato recipe`: the shipped recipes and their settings."""

from typing import Annotated

import typer
from rich.console import Console

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.flows.commands.launching import SeedOption, SetOption
from ostinato.flows.recipe import load_recipe, recipe_names
from ostinato.flows.recipe_text import describe_recipe

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
        Console().print(describe_recipe(loaded), highlight=False, markup=False, soft_wrap=True)

    return CommandResult(loaded, show)
