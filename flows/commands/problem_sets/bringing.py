"""`ostinato problems from`: a recipe for a repository that nobody prepared."""

from pathlib import Path
from typing import Any

import tomli_w

from ostinato.flows.stages.console import say
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import checksum_bytes
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.discovery.describing import DescribedSource, describe_source

# of a hundred problems
SHARES = {"demonstration": 35, "train": 35, "held_out": 15, "held_out_function": 10, "user": 5}
SMALLEST = 20  # every split gets a problem
FUNCTIONS_HELD_OUT = 4


def write_recipe(
    settings: Settings, place: str, name: str | None, extends: str, problems: int, commits: int
) -> Path:
    """Writes a recipe for what lies at `place` to the current folder. Refuses to change one of that name."""
    say(f"reading {place}")
    described = describe_source(place, name, settings.cache_directory / "archives", commits)
    source = described.repository
    say(f"  code: {', '.join(source.package_paths)}; tests: {', '.join(source.test_paths)}")
    say(f"  beside them: {', '.join((*source.kept_paths, *source.dependencies)) or 'nothing'}")
    for remark in described.remarks:
        say(f"  {remark}")
    text = recipe_text(described, place, extends, problems)
    return write_new(settings, Path(f"{source.name}.toml"), text)


def write_new(settings: Settings, path: Path, text: str) -> Path:
    """The path, which holds the text. ConfigError when it holds one that this has not written."""
    notes = settings.cache_directory / "written-recipes"  # a file per text, named by its checksum
    notes.mkdir(parents=True, exist_ok=True)
    if path.exists() and (found := path.read_bytes()) != text.encode():
        if not (notes / checksum_bytes(found)).exists():
            raise ConfigError(
                f"{path.resolve()} exists with another content, wanted none: take another name with "
                "--as, or `ostinato run problem-building --recipe` with the one that is there"
            )
        say(f"  {path} is written anew: the source or an option is another than before")
    path.write_text(text)
    (notes / checksum_bytes(text.encode())).touch()
    return path


def recipe_text(described: DescribedSource, place: str, extends: str, problems: int) -> str:
    """The recipe as TOML. Sizes of splits are shares of `problems`."""
    source = described.repository
    sources = {"repositories": source, "git": described.history}
    recipe = {
        "extends": extends,
        "name": source.name,
        "description": f"problems of {place}",
        "problems": {
            "functions_held_out": FUNCTIONS_HELD_OUT,
            "sizes": {split: problems * share // 100 for split, share in SHARES.items()},
            **{table: [written(record)] for table, record in sources.items() if record is not None},
        },
    }
    remark = (
        f"# Problems of {place}, described by `ostinato problems from`; change what it got wrong."
    )
    return f"{remark}\n{tomli_w.dumps(recipe)}"


def written(record: Record) -> dict[str, Any]:
    """A record as a recipe holds it: what differs from its defaults."""
    return record.model_dump(mode="json", exclude_defaults=True)
