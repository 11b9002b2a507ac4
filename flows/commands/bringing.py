"""`ostinato problems from`: a recipe for a repository that nobody prepared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.flows.reporting.console import say
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.discovery.describing import Described, describe_source

# of a hundred problems
SHARES = {"demonstration": 35, "train": 35, "held_out": 15, "held_out_function": 10, "user": 5}
SMALLEST = 20  # every split gets a problem
FUNCTIONS_HELD_OUT = 4


def write_recipe(
    settings: Settings, place: str, name: str | None, extends: str, problems: int, commits: int
) -> Path:
    """The path of the recipe for what lies at `place`, written to the current folder. A recipe of that
    name with another content is refused.
    """
    say(f"reading {place}")
    described = describe_source(place, name, settings.cache_directory / "archives", commits)
    source = described.repository
    say(f"  code: {', '.join(source.package_paths)}; tests: {', '.join(source.test_paths)}")
    say(f"  beside them: {', '.join((*source.kept_paths, *source.dependencies)) or 'nothing'}")
    for remark in described.remarks:
        say(f"  {remark}")
    path = Path(f"{source.name}.toml")
    text = recipe_text(described, place, extends, problems)
    if path.exists() and path.read_text() != text:
        raise ConfigError(
            f"{path.resolve()} exists with another content, wanted none: take another name with "
            "--as, or `ostinato run problem-building --recipe` with the one that is there"
        )
    path.write_text(text)
    return path


def recipe_text(described: Described, place: str, extends: str, problems: int) -> str:
    """The recipe as TOML. Sizes of splits are shares of `problems`."""
    source = described.repository
    sizes = {split: problems * share // 100 for split, share in SHARES.items()}
    lines = [
        f"# Problems of {place}, described by `ostinato problems from`; change what it got wrong.",
        f"extends = {_toml(extends)}",
        f"name = {_toml(source.name)}",
        f"description = {_toml(f'problems of {place}')}",
        "",
        "[problems]",
        f"functions_held_out = {FUNCTIONS_HELD_OUT}",
        "",
        "[problems.sizes]",
        *(f"{split} = {size}" for split, size in sizes.items()),
    ]
    tables = {"repositories": source, "git": described.history}
    for table, record in tables.items():
        if record is not None:
            values = record.model_dump(mode="json", exclude_defaults=True)
            lines += [
                "",
                f"[[problems.{table}]]",
                *(f"{k} = {_toml(v)}" for k, v in values.items()),
            ]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
