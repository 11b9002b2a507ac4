"""Process entry of the gateway, which serves the promoted checkpoint to people.

`python -m ostinato.flows.drivers.gateway --recipe nano`.

Follows the ledger's champion while it serves. It trains nothing and starts no flow.
"""

import argparse
import asyncio
import sys

from rich.console import Console

from ostinato.flows import realtime
from ostinato.flows.drivers.serving import open_local_gateway
from ostinato.flows.recipe import load_recipe
from ostinato.flows.stage import StageContext
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.telemetry import configure_logging
from ostinato.infra.serving.gateway.server import serve
from ostinato.infra.serving.gateway.serving import follow_plan

FOLLOW_SECONDS = 5.0
TENANT = "local"


def main() -> None:
    """Serves until interrupted; exit code 2 when nothing was promoted yet or the port is busy."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.drivers.gateway")
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--line", help="serving line; the recipe's when absent")
    options = parser.parse_args()
    configure_logging()
    try:
        context = StageContext.open(load_recipe(options.recipe))
        asyncio.run(_serve(context, realtime.served_line(context, options.line)))
    except OstinatoError as error:
        Console(stderr=True).print(
            f"[red]{type(error).__name__}[/]: {error}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


async def _serve(context: StageContext, line: str) -> None:
    settings = context.settings
    served = realtime.served_model(context, line)
    async with open_local_gateway(served, settings, TENANT) as (gateway, _):
        following = asyncio.create_task(
            follow_plan(
                gateway,
                lambda: realtime.served_model(context, line).plan,
                poll_seconds=FOLLOW_SECONDS,
            )
        )
        try:
            await serve(gateway.app, settings.host, settings.gateway_port)
        finally:
            following.cancel()


if __name__ == "__main__":
    main()
