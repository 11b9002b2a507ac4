"""A recipe for tasks of another collection: of Harbor, or of SWE-bench."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tomli_w

from ostinato.flows.commands.problem_sets.bringing import write_new, written
from ostinato.flows.stages.console import say
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.config import GivenSource
from ostinato.tasks.problems.given.harbor_reading import find_tasks, read_task
from ostinato.tasks.problems.given.swe_bench import is_instances, read_instances, take_instance
from ostinato.tasks.problems.given.task import GivenTask, store_task
from ostinato.tasks.records import Split

States = tuple[GivenTask, dict[str, bytes], dict[str, bytes]]


def is_collection(place: str) -> bool:
    """Whether a place holds tasks of Harbor, or is a file of instances of SWE-bench."""
    path = Path(place).expanduser()
    return is_instances(path) or (path.is_dir() and bool(find_tasks(path)))


def write_collection_recipe(
    settings: Settings, place: str, name: str | None, extends: str, clones: Path | None
) -> Path:
    """The path of the recipe for a collection of tasks, written to the current folder. Tasks that cannot become
    problems are named with the reason; ProblemError when none is left.
    """
    path = Path(place).expanduser()
    say(f"reading {path}")
    taken, left_out = _take_tasks(_readers(path, clones), settings.cache_directory / "archives")
    for task, why in left_out.items():
        say(f"  {task} left out: {why}")
    if not taken:
        raise ProblemError(f"none of the {len(left_out)} tasks of {path} can be read as a problem")
    say(f"  {len(taken)} tasks taken, {len(left_out)} left out")
    title = re.sub(r"[^a-z0-9_-]+", "-", (name or path.resolve().stem).lower()).strip("-")
    recipe = {
        "extends": extends,
        "name": title,
        "description": f"tasks of {place}",
        "problems": {"repositories": [], "given": [written(source) for source in taken]},
    }
    remark = f"# Tasks of {place}, read by `ostinato problems from`."
    return write_new(settings, Path(f"{title}.toml"), f"{remark}\n{tomli_w.dumps(recipe)}")


def _readers(path: Path, clones: Path | None) -> dict[str, Callable[[], States]]:
    """What reads each task of a collection, by its name."""
    if path.is_dir():
        if clones is not None:
            raise ConfigError(f"--clones {clones} with tasks of Harbor, wanted it with SWE-bench")
        return {task.name: partial(read_task, task) for task in find_tasks(path)}
    if clones is None:
        raise ConfigError(f"{path} needs --clones DIR, a folder of clones of its repositories")
    instances = read_instances(path)
    counted = Counter(item.instance_id for item in instances)
    if twice := sorted(name for name, count in counted.items() if count > 1):
        raise ConfigError(
            f"{path}: instance {twice[0]} stands there more than once, wanted it once"
        )
    return {item.instance_id: partial(take_instance, item, clones) for item in instances}


def _take_tasks(
    readers: dict[str, Callable[[], States]], cache: Path
) -> tuple[list[GivenSource], dict[str, str]]:
    """Sources of the tasks that can become problems, and why the others cannot."""
    taken: list[GivenSource] = []
    left_out: dict[str, str] = {}
    splits = deal_given(list(readers))
    for number, (name, read) in enumerate(readers.items()):
        try:
            task, solved, unsolved = read()
            source, remarks = store_task(task, solved, unsolved, cache, splits[name])
        except (ConfigError, ProblemError) as error:
            left_out[name] = str(error)
            continue
        for remark in remarks:
            say(f"  {name}: {remark}")
        taken.append(source)
        say(f"  {number + 1} of {len(readers)}: {name}")
    return taken, left_out


def deal_given(names: Sequence[str]) -> dict[str, Split]:
    """A split for each task: every fifth by a hash of its name is held out. The only one trains."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {
        name: Split.HELD_OUT if number % 5 == 4 else Split.TRAIN
        for number, name in enumerate(ordered)
    }
