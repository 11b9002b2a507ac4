"""Results of commands, of flows too: shown to a person, or printed as a JSON value with --json."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec

import typer
from pydantic_core import to_json

from ostinato.flows.commands.launching import FlowFailed
from ostinato.flows.python_api import open_home
from ostinato.flows.stages.console import say
from ostinato.flows.stages.forms import RunOptions

_Parameters = ParamSpec("_Parameters")
_JsonOption = Annotated[
    bool, typer.Option("--json", help="print only one JSON value to standard output")
]
_STDOUT, _STDERR = 1, 2
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command."""

    value: Any  # records or JSON values
    show: Callable[[], None] = lambda: None  # prints the result for a person
    exit_code: int = 0


def answering(command: Callable[_Parameters, CommandResult]) -> Callable[..., None]:
    """The command with the option --json. The exit code does not depend on it."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
        redirected = _stdout_to_stderr() if as_json else contextlib.nullcontext()
        try:
            with redirected:
                answer = command(*args, **kwargs)
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(_INTERRUPTED) from None
        if as_json:
            # numbers that JSON lacks (a diverged loss) become null
            typer.echo(to_json(answer.value, indent=1, inf_nan_mode="null"))
        else:
            answer.show()
        if answer.exit_code:
            raise typer.Exit(answer.exit_code)

    signature = inspect.signature(command)
    option = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JsonOption
    )
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option], return_annotation=None
    )
    run.__annotations__ = {**command.__annotations__, "as_json": _JsonOption, "return": None}
    return run


def launch_flow(
    flow: str,
    recipe: str,
    seed: int | None,
    options: RunOptions,
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """The result of a flow for a command, which exits with the exit code of a flow that failed."""
    try:
        return open_home().start(recipe, flow, seed=seed, options=options, parameters=parameters)
    except FlowFailed as error:
        raise typer.Exit(error.code) from None


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Within the block, standard output of this process and its children goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
