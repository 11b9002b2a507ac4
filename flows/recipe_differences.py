"""Settings in which recipes differ, by their dotted keys. A recipe is given by its name, by the path of a TOML file, or by
a run, whose directory keeps the recipe that it was made with.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.record import dotted

RECIPE_FILE = "recipe.json"  # in a run directory
NOT_THERE = "not there"  # in place of the value of a key that a recipe lacks


def settings_of(name: str, home: Path) -> dict[str, Any]:
    """Settings of a recipe by name, path or run, such as nano-seed0/reinforced-0a1b2c3d. ConfigError when nothing is
    called so.
    """
    kept: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # too long, or not encodable as a path
        kept = settings_of_run(home / "runs" / name)
    return kept or dict(dotted(load_recipe(name).model_dump(mode="json")))


def settings_of_run(directory: Path) -> dict[str, Any]:
    """Settings of the recipe that a run directory keeps. Empty for a run of an earlier version."""
    path = directory / RECIPE_FILE
    return dict(dotted(json.loads(path.read_bytes()))) if path.is_file() else {}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of each setting that differs, in the order of the keys."""
    pairs = {
        key: (first.get(key, NOT_THERE), second.get(key, NOT_THERE))
        for key in sorted({*first, *second})
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
