"""Runs one flow by name in this process: `python -m ostinato.infra.platform.start ostinato.flows.commands.run_flow NAME`.
The exit code is 1 when a gate failed, 2 on a known error, 3 on any other error.
"""

import argparse
import importlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from prefect.exceptions import Abort
from pydantic_core import to_json

from ostinato.flows.operating.local_prefect import await_server
from ostinato.flows.stages.console import print_error, say, watched
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.platform.telemetry import configure_logging

GATE_FAILED = "GateFailed"  # name of a flow's final state when a gate failed
_LAST_SECONDS = 20.0  # enough time to end the stage


def main(arguments: list[str]) -> int:
    """Calls the flow, which has the name of its module, with the parsed arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ostinato.flows.commands.run_flow")
    parser.add_argument("flow")
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--options", type=RunOptions.model_validate_json, default=RunOptions())
    parser.add_argument("--parameters", type=json.loads, default={}, help="more, as JSON")
    parser.add_argument("--watch", action="store_true", help="progress as lines")
    parser.add_argument("--answer", type=Path, help="file for the flow's result, as JSON")
    options = parser.parse_args(arguments)
    interrupt_on_signals()
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    configure_logging()
    try:
        module = importlib.import_module(f"ostinato.flows.{options.flow}")
        await_server()
        with watched(options.watch):
            state = getattr(module, options.flow)(
                recipe=options.recipe,
                seed=options.seed,
                options=options.options,
                return_state=True,
                **options.parameters,
            )
        if state.name == GATE_FAILED:
            return 1
        error = state.result(raise_on_failure=False)
    except OstinatoError as known:
        print_error(known)
        return 2
    except KeyboardInterrupt:
        return 130
    except Abort as cancelled:
        say(f"{cancelled}; the same command continues from here")
        return 130
    if not isinstance(error, BaseException):
        if options.answer is not None:
            options.answer.write_bytes(to_json(_named(error), inf_nan_mode="null"))
        return 0
    print_error(error)
    return 2 if isinstance(error, OstinatoError) else 3


def _named(returned: Any) -> Any:
    """A flow's result with artifacts replaced by their names."""
    if isinstance(returned, list | tuple):
        return [_named(item) for item in returned]
    return str(returned) if isinstance(returned, ArtifactRef) else returned


def _end_after(parent: int) -> None:
    """Ends this process soon after the command that started it. Otherwise Prefect would try for a quarter of an hour to
    report the end of the run to a server that has ended too.
    """
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_LAST_SECONDS)
    os._exit(130)
