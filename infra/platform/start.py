"""Start of a process whose main takes seconds to load. Ctrl-C meanwhile ends it without a traceback."""

import importlib
import sys
from typing import NoReturn

_INTERRUPTED = 130


def start(module: str, *arguments: list[str]) -> NoReturn:
    """Exits with the code that `main` of the module returns."""
    try:
        sys.exit(importlib.import_module(module).main(*arguments))
    except KeyboardInterrupt:  # while the module loads; main handles its own
        sys.exit(_INTERRUPTED)


def ostinato() -> NoReturn:
    """The command that a person types."""
    start("ostinato.flows.cli")


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2:])
