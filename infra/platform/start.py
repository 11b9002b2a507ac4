"""Starts a program whose main module takes seconds to import. Ctrl-C during the import gives no traceback."""

import importlib
import sys
from typing import NoReturn

_INTERRUPTED = 130


def start(module: str, *arguments: list[str]) -> NoReturn:
    """Exits with the code that `main` of the module returns."""
    try:
        sys.exit(importlib.import_module(module).main(*arguments))
    except KeyboardInterrupt:  # during the import; main handles later ones
        sys.exit(_INTERRUPTED)


def ostinato() -> NoReturn:
    """Entry point of the `ostinato` command."""
    start("ostinato.flows.cli")


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2:])
