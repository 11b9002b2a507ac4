"""Names of flow runs and of their artifacts in Prefect, made of recipe, seed and subject."""

import re

from prefect.runtime import flow_run

from ostinato.flows.recipe_text import recipe_and_seed, run_title


def run_name() -> str:
    """Name of the current flow run, for example `nano-seed0 reinforcement`."""
    return run_title(flow_run.flow_name, flow_run.parameters)


def artifact_key(what: str) -> str:
    """Key of an artifact of the current flow run. Each recipe and seed has a separate history."""
    return as_key(recipe_and_seed(flow_run.parameters), what)


def as_key(*parts: str) -> str:
    """The parts as a key that Prefect accepts: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, parts)).lower()).strip("-")
