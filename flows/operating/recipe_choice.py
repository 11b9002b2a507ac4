"""A recipe and changes to it, as a command line or a running `ostinato up` names them."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.infra.platform.record import Record


class RecipeChoice(Record):
    """A recipe by name or path, and what `--set` changes in it."""

    name: str
    overrides: tuple[str, ...] = ()

    def load(self) -> Recipe:
        """The recipe with its changes. ConfigError names the key that is wrong."""
        return load_recipe(self.name, overrides=self.overrides)

    def with_whole_path(self) -> "RecipeChoice":
        """The same with an absolute path, so that it can be read from any directory."""
        path = Path(self.name)
        return self.model_copy(update={"name": str(path.resolve())}) if path.is_file() else self

    def arguments(self) -> list[str]:
        """Options of a process that `choice_of` reads."""
        return ["--recipe", self.name, *(f"--set={override}" for override in self.overrides)]

    def __str__(self) -> str:
        return " ".join((self.name, *(f"--set {override}" for override in self.overrides)))


def add_choice(parser: ArgumentParser) -> None:
    """Gives a process the options of `RecipeChoice.arguments`."""
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--set", action="append", default=[], dest="overrides")


def choice_of(options: Namespace) -> RecipeChoice:
    """What the options of a process name."""
    return RecipeChoice(name=options.recipe, overrides=tuple(options.overrides))
