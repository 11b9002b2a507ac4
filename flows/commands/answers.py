"""What a command found: told to a person, or with --json to a program as one JSON value."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec

import typer
from pydantic_core import to_json

from ostinato.flows.stages.console import say

_Parameters = ParamSpec("_Parameters")
_JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON value, alone on standard output")
]
_STDOUT, _STDERR = 1, 2
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command."""

    value: Any  # records, or what JSON has
    show: Callable[[], None]  # tells it to a person
    exit_code: int = 0


def answering(command: Callable[_Parameters, Answer]) -> Callable[..., None]:
    """The command with the option --json. The exit code does not depend on it."""

    @functools.wraps(command)
    def told(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
        if as_json:
            with _standard_output_spared(), _stopped_quietly():
                answer = command(*args, **kwargs)
            # what JSON has no number for (a diverged loss) is null
            typer.echo(to_json(answer.value, indent=1, inf_nan_mode="null"))
        else:
            with _stopped_quietly():
                answer = command(*args, **kwargs)
            answer.show()
        if answer.exit_code:
            raise typer.Exit(answer.exit_code)

    signature = inspect.signature(command)
    option = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JsonOption
    )
    told.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option], return_annotation=None
    )
    told.__annotations__ = {**command.__annotations__, "as_json": _JsonOption, "return": None}
    return told


@contextlib.contextmanager
def _stopped_quietly() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(_INTERRUPTED) from None


@contextlib.contextmanager
def _standard_output_spared() -> Iterator[None]:
    """What is printed meanwhile, by this process and those it starts, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
