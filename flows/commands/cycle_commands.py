"""`ostinato cycle`: the real-time cycles of a serving line, and commands that end an open one."""

import contextlib
import time
from typing import Annotated

import typer

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.flows.commands.launching import SetOption
from ostinato.flows.operating import local_prefect
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.cluster.processes import live_owners
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.ledger.rows import CycleRow
from ostinato.infra.platform.settings import Settings, load_settings

cycles = typer.Typer(no_args_is_help=True, help="Real-time cycles of a serving line.")
LineOption = Annotated[
    str | None, typer.Option(help="serving line; that of the recipe when absent")
]
RecipeOption = Annotated[str, typer.Option(help="recipe that names the serving line")]
# Loaded by name: Prefect and scipy would delay the other commands by seconds.
ROLL_BACK = "ostinato.flows.stages.realtime:roll_back"
DESCRIBE_CANARY = "ostinato.flows.operating.status.ledger:describe_canary"
SEND_SKIPPED = "ostinato.flows.stages.events:send_cycle_skipped"
_STAGES = ("candidate-*", "traffic-*")


@cycles.command("show")
@answering
def show(
    recipe: RecipeOption = "nano", line: LineOption = None, settings: SetOption = None
) -> CommandResult:
    """Lists the cycles of the line, oldest first: window, initial checkpoint, outcome; then its canary."""
    name = _line(recipe, line, settings)
    chosen = load_recipe(recipe, overrides=settings or ())
    people = chosen.cycle.people_canary
    with contextlib.closing(open_ledger(load_settings())) as ledger:
        rows = ledger.cycles.history(name)
        if not rows:
            chosen.require_line(name, ledger.promotions.lines())
        guard = None if people is None else people.guard
        canary: str = load_entry(DESCRIBE_CANARY)(ledger, name, guard)

    def print_rows() -> None:
        for row in rows:
            text = (
                f"{row.cycle_id}  interactions {row.from_watermark + 1} to {row.to_watermark}, from "
                f"{row.served}: {row.outcome or 'open'}"
            )
            typer.echo(text)
        if not rows:
            typer.echo("no cycle yet")
        if canary:
            typer.echo(canary)

    return CommandResult(rows, print_rows)


@cycles.command("skip")
@answering
def skip(
    recipe: RecipeOption = "nano", line: LineOption = None, settings: SetOption = None
) -> CommandResult:
    """Ends the open cycle without training on its interactions. The next cycle starts after them."""
    return _end(_line(recipe, line, settings), "skipped")


@cycles.command("close")
@answering
def close(
    recipe: RecipeOption = "nano", line: LineOption = None, settings: SetOption = None
) -> CommandResult:
    """Ends the open cycle with its current outcome: promoted, refused, or skipped when nothing was decided."""
    return _end(_line(recipe, line, settings), None)


@cycles.command("roll-back")
@answering
def roll_back(
    reason: Annotated[str, typer.Option(help="reason for the line's history")],
    recipe: RecipeOption = "nano",
    line: LineOption = None,
    overrides: SetOption = None,
) -> CommandResult:
    """Withdraws the champion. The previous champion serves again within seconds."""
    name = _line(recipe, line, overrides)
    settings = load_settings()
    local_prefect.use_own_server(settings)
    with contextlib.closing(open_ledger(settings)) as ledger:
        report = load_entry(ROLL_BACK)(ledger, name, None, reason)
    text = f"{name}: {report.candidate} withdrawn, {report.champion} serves"
    return CommandResult(report, lambda: typer.echo(text))


def _end(line: str, outcome: str | None) -> CommandResult:
    settings = load_settings()
    with contextlib.closing(open_ledger(settings)) as ledger:
        cycle = ledger.cycles.open_cycle(line)
        if cycle is None:
            raise ConfigError(f"serving line {line!r} has no open cycle, wanted one")
        _require_no_owner(settings, cycle)
        ended: str = outcome or cycle.stages.get("promotion", {}).get("outcome", "skipped")
        ledger.cycles.close(cycle.cycle_id, ended, time.time())
    if ended == "skipped":
        local_prefect.use_own_server(settings)
        load_entry(SEND_SKIPPED)(cycle.cycle_id, "by hand")
    value = {"cycle_id": cycle.cycle_id, "outcome": ended}
    return CommandResult(value, lambda: typer.echo(f"{cycle.cycle_id}: {ended}"))


def _require_no_owner(settings: Settings, cycle: CycleRow) -> None:
    for pattern in _STAGES:
        for directory in (settings.home / "runs").glob(f"*/{pattern}"):
            owners = live_owners(directory)
            if owners:
                raise ConfigError(
                    f"process {owners[0].pid} works in {directory}, wanted no run of {cycle.cycle_id}; "
                    "cancel it first"
                )


def _line(recipe: str, line: str | None, overrides: list[str] | None) -> str:
    found = line or load_recipe(recipe, overrides=overrides or ()).serving.line
    if found is None:
        raise ConfigError(f"recipe {recipe!r} has no serving line, wanted --line NAME")
    return found
