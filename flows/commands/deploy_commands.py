"""`ostinato deploy` and `ostinato deploy-files`: deployment of flows, and files for clusters."""

from pathlib import Path
from typing import Annotated

import typer

from ostinato.flows.commands.launching import RecipeOption, SetOption
from ostinato.flows.operating.local_prefect import (
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    WORK_POOL,
    PoolType,
    deploy_elsewhere,
)
from ostinato.flows.operating.recipe_choice import RecipeChoice
from ostinato.flows.stages.console import say
from ostinato.infra.deploy import copy_files
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.settings import load_settings


def deploy(
    recipe: RecipeOption = "nano",
    settings: SetOption = None,
    pool: Annotated[
        PoolType, typer.Option(help="runs flows as a process, a container or a job")
    ] = PoolType.PROCESS,
    image: Annotated[
        str | None,
        typer.Option(help="image made by infra/deploy/Containerfile; ostinato:latest when absent"),
    ] = None,
) -> None:
    """Deploys to the Prefect server of PREFECT_API_URL: work pool, queues, deployments, automations."""
    choice = RecipeChoice(name=recipe, overrides=tuple(settings or ()))
    choice.load()
    url = deploy_elsewhere(load_settings(), choice, pool, image)
    typer.echo(f"deployed recipe {choice} to {url}")
    heartbeat = f"{HEARTBEAT}={HEARTBEAT_SECONDS} " if pool == PoolType.PROCESS else ""
    typer.echo(f"a worker for it: {heartbeat}prefect worker start --pool {WORK_POOL}")


def deploy_files(
    directory: Annotated[
        Path, typer.Argument(help="folder for the files; created when missing", file_okay=False)
    ],
) -> None:
    """Writes the container file, the KubeRay manifest, the Slurm script and the work pools' templates."""
    with boundary(ConfigError, f"files for clusters into {directory}"):
        for path in copy_files(directory):
            say(f"wrote {path}")
