"""What a report says of where it comes from: machine, code, changes to the shipped recipe."""

import importlib.metadata
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import ostinato
from ostinato.flows.recipe import Recipe, load_recipe, recipe_names
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.git import run_git
from ostinato.infra.platform.record import dotted
from ostinato.infra.platform.settings import Settings


def describe_origin(recipe: Recipe, settings: Settings) -> dict[str, str]:
    """Facts of the machine and the code that write a report now, and of its recipe."""
    return {
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
        "machine": _machine(settings),
        "code": _code(),
        "python": platform.python_version(),
        "changes to the shipped recipe": "; ".join(recipe_changes(recipe)) or "none",
    }


def recipe_changes(recipe: Recipe) -> Iterator[str]:
    """What differs from the shipped recipe of that name, as section.key: shipped -> used."""
    if recipe.name not in recipe_names():
        yield f"{recipe.name} is a recipe of your own"
        return
    original = load_recipe(recipe.name, seed=recipe.seed)
    shipped, used = (dict(dotted(one.model_dump(mode="json"))) for one in (original, recipe))
    for name in sorted(shipped.keys() | used.keys()):
        if shipped.get(name) != used.get(name):
            yield f"{name}: {shipped.get(name)} -> {used.get(name)}"


def _machine(settings: Settings) -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gib = psutil.virtual_memory().total / 2**30
    model = names[0] if names else platform.machine()
    return f"{model}, {settings.cpu_limit} cores, {memory_gib:.0f} GiB, device {settings.device}"


def _code() -> str:
    root = Path(ostinato.__file__).parent
    version = f"ostinato {importlib.metadata.version('ostinato')}"
    try:
        commit = run_git(root, "rev-parse", "HEAD").decode().strip()
        is_changed = bool(run_git(root, "status", "--porcelain", "--untracked-files=no").strip())
    except ProblemError:  # installed, not a checkout
        return version
    return f"{version}, commit {commit}{', with changes' if is_changed else ''}"
