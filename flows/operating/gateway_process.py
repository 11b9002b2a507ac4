"""Process entry of the gateway: `python -m ostinato.flows.operating.gateway_process --recipe nano`."""

import argparse
import asyncio
import logging
import sys
import time

from ostinato.flows.operating.recipe_choice import add_choice, choice_of
from ostinato.flows.stages import realtime
from ostinato.flows.stages.console import print_error
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.telemetry import configure_logging

logger = logging.getLogger(__name__)

WAIT_SECONDS = 5.0  # between two checks for a first checkpoint


def main() -> None:
    """Waits for a first checkpoint, then serves until interrupted. Exit code 2 when the port is busy."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.operating.gateway_process")
    add_choice(parser)
    parser.add_argument("--line", help="serving line; the recipe's when absent")
    options = parser.parse_args()
    configure_logging()
    try:
        choice = choice_of(options)
        context = StageContext.open(choice.name, options=RunOptions(overrides=choice.overrides))
        served = context.recipe.served_line(options.line, context.ledger.promotions.lines())
        line = realtime.serving_line(context, served).name
        while context.ledger.promotions.current(line) is None:
            logger.info("line=%s waits_for=a checkpoint that passed its gate", line)
            time.sleep(WAIT_SECONDS)
        serve_people = load_entry("ostinato.tasks.realtime.traffic:serve_people")
        asyncio.run(serve_people(lambda: realtime.served_model(context, line), context.settings))
    except OstinatoError as error:
        print_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
