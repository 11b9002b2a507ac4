"""Ablations of RL on nano, one (arm, seed) after another, each once.

    python -m tests.benchmarks.ablations --minutes M [--seeds 3] [--arms shipped,deviation]

Begins the next missing pair of ablations.toml until M minutes are used (0: prints what is known),
runs `ostinato run controls` for it under OSTINATO_HOME, where pairs of a seed share all stages
before RL, and appends its row to docs/lab/ablations.jsonl. A pair that was stopped goes on where it
was. About 13 minutes per pair on two idle cores once its seed's first stages are there.
"""

import argparse
import json
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ostinato.flows.stages import chain
from ostinato.flows.stages.run_options import STAGES, RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.tasks.evaluation.controls import ControlReport
from ostinato.tasks.records import Metric
from ostinato.tasks.reinforcement.records import ReinforcementResult

RECIPE = "nano"
ROWS = Path(__file__).parents[2] / "docs/lab/ablations.jsonl"
ARMS_FILE = Path(__file__).with_suffix(".toml")
CLI = [sys.executable, "-c", "from ostinato.flows.cli import main; main()"]


class Arm(Record):
    """Overrides of the recipe under a name."""

    says: str
    set: tuple[str, ...]


class Row(Record):
    """One run of RL beside its controls."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    commit: str
    date: str
    steps: int
    attempts: int = Field(description="trained and stale ones together")
    rl_seconds: float
    start_solved: float
    trained_solved: float
    differences: dict[str, Metric] = Field(description="trained minus each control, by its name")
    tokens: tuple[float, float] = Field(description="per attempt, before and after")
    first_edit_solved: tuple[float, float] = Field(description="before and after")
    gain_counts: bool


def read_rows(path: Path = ROWS) -> dict[tuple[str, int], Row]:
    """What is known, by arm and seed."""
    if not path.exists():
        return {}
    rows = [Row.model_validate_json(line) for line in path.read_text().splitlines()]
    return {(row.arm, row.seed): row for row in rows}


def run_pair(name: str, arm: Arm, seed: int) -> Row:
    """Trains and evaluates; what the home already holds is not done again."""
    command = [*CLI, "run", "controls", "--recipe", RECIPE, "--seed", str(seed)]
    for override in arm.set:
        command += ["--set", override]
    subprocess.run(command, check=True)
    context = StageContext.open(RECIPE, seed, RunOptions(overrides=arm.set))
    kind = STAGES["controls"].kind
    newest = max(
        context.ledger.artifacts.list(kind, context.recipe.name),
        key=lambda row: row.created_at,
        default=None,
    )
    if newest is None:
        raise ConfigError(f"no {kind} of {context.recipe.name} in {context.settings.home}")
    ref = context.artifacts.get(f"{newest.kind}/{newest.name}@{newest.version}")
    report = chain.result_of(context, ref, ControlReport)
    _, evaluation = context.artifacts.manifest(ref).parents
    reinforced = next(
        parent
        for parent in context.artifacts.manifest(evaluation).parents
        if parent.kind == STAGES["reinforcement"].kind
    )
    run = chain.result_of(context, reinforced, ReinforcementResult)
    start = next(control for control in report.controls if control.name == "start")
    return Row(
        arm=name,
        seed=seed,
        overrides=arm.set,
        commit=_git("rev-parse", "--short", "HEAD"),
        date=datetime.now(UTC).date().isoformat(),
        steps=run.steps,
        attempts=sum(run.trajectories.values()),
        rl_seconds=run.used_seconds,
        start_solved=start.solved,
        trained_solved=report.trained.solved,
        differences={
            control.name: control.difference
            for control in report.controls
            if control.difference is not None
        },
        tokens=(start.generated_tokens, report.trained.generated_tokens),
        first_edit_solved=(start.first_edit_solved or 0.0, report.trained.first_edit_solved or 0.0),
        gain_counts=report.gain_counts,
    )


def show(arms: dict[str, Arm], known: dict[tuple[str, int], Row], seeds: int) -> None:
    """Gain over the start by arm and seed."""
    table = Table(title="points over the SFT start, 95 % by function; * beats every control")
    table.add_column("arm")
    for seed in range(seeds):
        table.add_column(f"seed {seed}")
    for name in arms:
        table.add_row(name, *(_cell(known.get((name, seed))) for seed in range(seeds)))
    Console().print(table)


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    gain = row.differences["start"]
    text = f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    return f"{text}{'*' if row.gain_counts else ''} {row.steps} steps"


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True, cwd=ROWS.parent
    ).stdout.strip()


def main() -> None:
    """Run what is missing, print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", help="names, with commas; all of ablations.toml unless given")
    options = parser.parse_args()
    arms = {
        name: Arm.model_validate(found)
        for name, found in tomllib.loads(ARMS_FILE.read_text()).items()
    }
    names = options.arms.split(",") if options.arms else list(arms)
    if unknown := set(names) - arms.keys():
        parser.error(f"no arm {', '.join(sorted(unknown))}, wanted some of {', '.join(arms)}")
    ends = time.monotonic() + 60 * options.minutes
    for seed in range(options.seeds):
        for name in names:
            if (name, seed) in read_rows() or time.monotonic() >= ends:
                continue
            row = run_pair(name, arms[name], seed)
            ROWS.parent.mkdir(exist_ok=True)
            with ROWS.open("a") as file:
                file.write(row.model_dump_json() + "\n")
    known = read_rows()
    show(arms, known, options.seeds)
    counting = sum(row.gain_counts for row in known.values())
    print(json.dumps({"name": "ablations", "runs": len(known), "beat_every_control": counting}))


if __name__ == "__main__":
    main()
