"""Names of flow runs and of their artifacts in Prefect: recipe, seed, and what it is."""

import re
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError


def run_name() -> str:
    """Name of the flow run under way, for example `nano-seed0 reinforcement`."""
    of_what = _recipe_and_seed(flow_run.parameters)
    return " ".join(filter(None, (of_what, flow_run.flow_name)))


def artifact_key(what: str) -> str:
    """Key of an artifact of the flow run under way; recipes and seeds have histories of their own."""
    return as_key(_recipe_and_seed(flow_run.parameters), what)


def as_key(*parts: str) -> str:
    """A key as Prefect wants it: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, parts)).lower()).strip("-")


def _recipe_and_seed(parameters: dict[str, Any]) -> str:
    recipe, seed = parameters.get("recipe"), parameters.get("seed")
    if not isinstance(recipe, str):
        return ""
    try:
        loaded = load_recipe(recipe, seed=seed)
    except ConfigError:  # the run itself says what is wrong with it
        return Path(recipe).stem
    return f"{loaded.name}-seed{loaded.seed}"
