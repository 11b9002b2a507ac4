"""Runs one flow by name in this process: `python -m ostinato.flows.run_flow NAME --recipe nano`. Exit code 2 on a known error."""

import argparse
import importlib
import sys

from ostinato.flows.console import print_error
from ostinato.flows.run_options import RunOptions
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.telemetry import configure_logging


def main(arguments: list[str]) -> int:
    """Parses, loads the recipe, calls the flow of the same name as its module."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.run_flow")
    parser.add_argument("flow")
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--options", type=RunOptions.model_validate_json, default=RunOptions())
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    configure_logging()
    try:
        module = importlib.import_module(f"ostinato.flows.{options.flow}")
        getattr(module, options.flow)(
            recipe=options.recipe, seed=options.seed, options=options.options
        )
    except OstinatoError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
