"""`ostinato problems`: recipes for arbitrary repositories and task collections, and export of problems."""

import hashlib
import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from ostinato.flows.stages.checkpoints import PROBLEM_KINDS
from ostinato.flows.stages.console import say
from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.objects import checksum_bytes
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems.config import GivenSource
from ostinato.tasks.problems.discovery.describing import (
    DescribedSource,
    describe_source,
    local_path,
)
from ostinato.tasks.problems.given.harbor_reading import find_tasks, read_task
from ostinato.tasks.problems.given.harbor_writing import write_task
from ostinato.tasks.problems.given.swe_bench import is_instances, read_instances, take_instance
from ostinato.tasks.problems.given.task import GivenTask, store_task
from ostinato.tasks.problems.given.verifiers_writing import write_package
from ostinato.tasks.problems.published import PROBLEMS_FILE, load_problems, load_repositories
from ostinato.tasks.problems.suites import (
    SLICES,
    assign_slices,
    choose_problems,
    write_suite,
)
from ostinato.tasks.records import Split

# percentage of problems per split
SHARES = {"demonstration": 35, "train": 35, "held_out": 15, "held_out_function": 10, "user": 5}
FUNCTIONS_HELD_OUT = 4
States = tuple[GivenTask, dict[str, bytes], dict[str, bytes]]


def write_recipe(
    settings: Settings,
    place: str,
    name: str | None,
    extends: str,
    problems: int,
    commits: int,
    split: Split | None,
    quotas: Mapping[str, int],
) -> Path:
    """Writes a recipe for the repository at `place` to the current folder, unless that would replace an edited one."""
    say(f"reading {place}")
    described = describe_source(place, name, settings.cache_directory / "archives", commits)
    source = described.repository.model_copy(update={"split": split})
    described = described.model_copy(update={"repository": source})
    say(f"  code: {', '.join(source.package_paths)}; tests: {', '.join(source.test_paths)}")
    say(f"  also used: {', '.join((*source.kept_paths, *source.dependencies)) or 'nothing'}")
    for remark in described.remarks:
        say(f"  {remark}")
    text = recipe_text(described, place, extends, problems, quotas)
    return write_new(settings, Path(f"{source.name}.toml"), text)


def write_new(settings: Settings, path: Path, text: str) -> Path:
    """Writes the text and returns the path. ConfigError when the file holds a text that this command did not write."""
    notes = settings.cache_directory / "written-recipes"  # a file per text, named by its checksum
    notes.mkdir(parents=True, exist_ok=True)
    if path.exists() and (found := path.read_bytes()) != text.encode():
        if not (notes / checksum_bytes(found)).exists():
            raise ConfigError(
                f"{path.resolve()} exists with other content, wanted no such file: give another name with "
                "--as, or use the existing recipe with `ostinato run problem-building --recipe`"
            )
        say(f"  {path} is rewritten: the source or an option has changed")
    path.write_text(text)
    (notes / checksum_bytes(text.encode())).touch()
    return path


def recipe_text(
    described: DescribedSource, place: str, extends: str, problems: int, quotas: Mapping[str, int]
) -> str:
    """The recipe as TOML. Sizes of splits are shares of `problems`. `quotas`: numbers of other problems, by kind."""
    source = described.repository
    place = re.sub(r"(?<=://)[^/@]*@", "", place)  # a password, as recipes are shown and shared
    sources = {"repositories": source, "git": described.history}
    recipe = {
        "extends": extends,
        "name": source.name,
        "description": f"problems of {place}",
        "problems": {
            "functions_held_out": FUNCTIONS_HELD_OUT,
            "sizes": {split: problems * share // 100 for split, share in SHARES.items()},
            **({"quotas": asked} if (asked := {k: n for k, n in quotas.items() if n}) else {}),
            **{table: [written(record)] for table, record in sources.items() if record is not None},
        },
    }
    remark = f"# Problems of {place}, described by `ostinato problems from`; correct any mistakes."
    return f"{remark}\n{tomli_w.dumps(recipe)}"


def written(record: Record) -> dict[str, Any]:
    """The values of a record that differ from its defaults, in the form of a recipe."""
    return record.model_dump(mode="json", exclude_defaults=True)


def is_collection(place: str) -> bool:
    """Whether a place is a folder of Harbor tasks or a file of SWE-bench instances."""
    path = local_path(place)
    try:
        return is_instances(path) or (path.is_dir() and bool(find_tasks(path)))
    except OSError:  # a name that is too long, or a closed folder
        return False


def write_collection_recipe(
    settings: Settings, place: str, name: str | None, extends: str, clones: Path | None
) -> Path:
    """Writes a recipe for a collection of tasks to the current folder and returns its path. Prints the tasks that
    cannot become problems, with reasons. ProblemError when no task is left.
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
    """Readers of the tasks of a collection by name."""
    if path.is_dir():
        if clones is not None:
            raise ConfigError(f"--clones {clones} with Harbor tasks, wanted it with SWE-bench")
        return {task.name: partial(read_task, task) for task in find_tasks(path)}
    if clones is None:
        raise ConfigError(f"{path} needs --clones DIR, a folder of clones of its repositories")
    instances = read_instances(path)
    counted = Counter(item.instance_id for item in instances)
    if twice := sorted(name for name, count in counted.items() if count > 1):
        raise ConfigError(f"{path}: instance {twice[0]} occurs more than once, wanted once")
    return {item.instance_id: partial(take_instance, item, clones) for item in instances}


def _take_tasks(
    readers: dict[str, Callable[[], States]], cache: Path
) -> tuple[list[GivenSource], dict[str, str]]:
    """Sources of the tasks that can become problems, and the reasons why the others cannot."""
    taken: list[GivenSource] = []
    left_out: dict[str, str] = {}
    splits = split_tasks(list(readers))
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


def split_tasks(names: Sequence[str]) -> dict[str, Split]:
    """A split for each task: every fifth in the order of the names' hashes is held out, the others train."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {
        name: Split.HELD_OUT if number % 5 == 4 else Split.TRAIN
        for number, name in enumerate(ordered)
    }


def export_tasks(settings: Settings, place: str, directory: Path, limit: int | None) -> int:
    """Writes problems as tasks to `directory`, a folder each. Prints those left out. Returns the number written."""
    folder = find_problem_set(settings, place)
    repositories = load_repositories(folder)
    version = importlib.metadata.version("pytest")
    written = 0
    for problem in load_problems(folder):
        if written == limit:
            break
        try:
            write_task(problem, repositories[problem.repository], directory, version)
            written += 1
        except ProblemError as error:
            say(f"  left out: {error}")
    return written


def export_package(settings: Settings, place: str, directory: Path, limit: int | None) -> int:
    """Writes a package of problems to `directory`. Returns the number of problems in it."""
    folder = find_problem_set(settings, place)
    return write_package(load_problems(folder)[:limit], folder, directory)


def make_suite(
    settings: Settings,
    place: str,
    directory: Path,
    version: int,
    splits: Sequence[Split],
    max_per_slice: int | None,
) -> tuple[str, dict[str, int]]:
    """Writes a suite of a set's problems to a new folder. Returns its title and the number of problems by slice.
    Prints how many problems are in no slice. ProblemError when no problem is left.
    """
    folder = find_problem_set(settings, place)
    problems = [problem for problem in load_problems(folder) if problem.split in splits]
    if unsliced := sum(not any(rule.holds(one) for rule in SLICES.values()) for one in problems):
        say(f"{unsliced} problems left out: in no slice")
    chosen = choose_problems(problems, SLICES, max_per_slice)
    if not chosen:
        raise ProblemError(
            f"{place} has {len(problems)} problems of split {', '.join(splits)} and none of a slice, wanted at least "
            f"1 of {', '.join(SLICES)}"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-._") or "suite"
    card = write_suite(folder, directory, chosen, name, version)
    slices = assign_slices(chosen, card.slices)
    return card.title, {slice_name: len(ids) for slice_name, ids in slices.items()}


def find_problem_set(settings: Settings, place: str, otherwise: str = "") -> Path:
    """The directory of a problem set: a folder, or an artifact's local copy. `otherwise`: end of the error message."""
    if (Path(place) / PROBLEMS_FILE).is_file():
        return Path(place)
    if "/" not in place or "@" not in place:
        raise ConfigError(
            f"PROBLEMS is {place!r}, wanted a folder with {PROBLEMS_FILE} or an artifact "
            f"problems/NAME@VERSION{otherwise}"
        )
    artifacts = open_artifacts(settings)
    ref = artifacts.get(place)
    if ref.kind not in PROBLEM_KINDS:
        raise ConfigError(f"{place} is not a problem set, wanted one of {', '.join(PROBLEM_KINDS)}")
    return artifacts.local_copy(ref, settings.home)
