"""A recipe and changes to it, as given on a command line or recorded by a running `ostinato up`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.infra.platform.record import Record


class RecipeChoice(Record):
    """A recipe by name or path, and the changes of `--set`."""

    name: str
    overrides: tuple[str, ...] = ()

    def load(self) -> Recipe:
        """The recipe with its changes. ConfigError names the wrong key."""
        return load_recipe(self.name, overrides=self.overrides)

    def with_whole_path(self) -> "RecipeChoice":
        """The same choice with an absolute path, so that it can be read from any directory."""
        path = Path(self.name)
        return self.model_copy(update={"name": str(path.resolve())}) if path.is_file() else self

    def arguments(self) -> list[str]:
        """Command-line options that `choice_of` reads back."""
        return ["--recipe", self.name, *(f"--set={override}" for override in self.overrides)]

    def __str__(self) -> str:
        return " ".join((self.name, *(f"--set {override}" for override in self.overrides)))


def add_choice(parser: ArgumentParser) -> None:
    """Adds the options of `RecipeChoice.arguments` to a parser."""
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--set", action="append", default=[], dest="overrides")


def choice_of(options: Namespace) -> RecipeChoice:
    """The choice that parsed options name."""
    return RecipeChoice(name=options.recipe, overrides=tuple(options.overrides))
