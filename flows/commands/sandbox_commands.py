"""`ostinato sandboxes`: boxes for programs that use E2B's SDK."""

import asyncio
from typing import Annotated

import typer

from ostinato.flows.commands.launching import RecipeOption, SetOption
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.settings import load_settings

# Loaded by name: its imports would delay every other command.
SERVER = "ostinato.infra.serving.sandboxes.server"
CONFIG = "ostinato.infra.serving.sandboxes.service:SandboxServiceConfig"
PORT = 8402

sandboxes = typer.Typer(no_args_is_help=True, help="Boxes for programs that use E2B's SDK.")


@sandboxes.callback()
def group() -> None:
    """Keeps `serve` a subcommand, though it is the only one."""


@sandboxes.command()
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = PORT,
    warm: Annotated[int, typer.Option(min=0, help="boxes that wait for a renter")] = 4,
    most: Annotated[int, typer.Option(min=1, help="sandboxes at a time, paused ones too")] = 64,
    recipe: RecipeOption = "nano",
    settings: SetOption = None,
) -> None:
    """Serves boxes with the API of E2B until Ctrl-C. The recipe's [sandbox.egress] opens their network."""
    home = load_settings()
    egress = load_recipe(recipe, overrides=tuple(settings or ())).sandbox.egress
    config = load_entry(CONFIG)(warm=warm, most=most, egress=egress)
    key_file = home.home / load_entry(f"{SERVER}:KEY_FILE")

    def tell(address: str) -> None:
        typer.echo(
            f"export E2B_API_URL={address} E2B_SANDBOX_URL={address} E2B_API_KEY=$(cat {key_file})"
        )

    asyncio.run(load_entry(f"{SERVER}:serve_sandboxes")(config, home.home, home.host, port, tell))
