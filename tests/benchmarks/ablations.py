"""Ablations of RL on nano, one (arm, seed) after another, each once.

    python -m tests.benchmarks.ablations --minutes M [--seeds 3] [--arms baseline,deviation]

Begins the next missing pair of ablations.toml until M minutes are used (0: prints what is known),
runs `ostinato run controls` for it under OSTINATO_HOME, where pairs of a seed share all stages
before RL, appends its row to docs/lab/ablations.jsonl and writes docs/lab/ablations.md from all of
them. A pair that was stopped goes on where it was. The arms of a seed are compared with its
baseline problem by problem, so the baseline comes first; where the home lacks its attempts, because
another one made them, it is run again and the table has the newer row.

Time to a reward is wall time of RL until the mean reward of five steps in a row has made half of the
rise that the baseline of the seed makes from its first five steps to its last five.
"""

import argparse
import json
import math
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from ostinato.flows.reporting.evaluations import read_rows as read_attempts
from ostinato.flows.stages import chain
from ostinato.flows.stages.declared import CONTROLS, REINFORCEMENT
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.record import Record
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.platform.telemetry import read_metrics
from ostinato.tasks.evaluation.controls import CONFIDENCE, ControlReport
from ostinato.tasks.evaluation.statistics import AttemptRow, cluster_bootstrap
from ostinato.tasks.records import Metric
from ostinato.tasks.reinforcement.records import ReinforcementResult

RECIPE = "nano"
ROWS = Path(__file__).parents[2] / "docs/lab/ablations.jsonl"
PAGE = ROWS.with_suffix(".md")
ARMS_FILE = Path(__file__).with_suffix(".toml")
CLI = [sys.executable, "-c", "from ostinato.flows.cli import main; main()"]
BASELINE = "baseline"
SYNCHRONOUS = "synchronous"
SHARED_STAGES = ("problems", "corpus", "pretraining", "mtp")
WINDOW_STEPS = 5
MISMATCHES = {  # what is compared, and its metric of a step
    "equal weights": "parity_one_cache_k3_nats",
    "all tokens": "mismatch_all_k3_nats",
    "own routes": "mismatch_without_replay_k3_nats",
}

Curve = Sequence[tuple[float, float]]  # seconds of RL and mean reward, by step


class Arm(Record):
    """Overrides of the recipe under a name, beside those of every arm."""

    says: str
    set: tuple[str, ...] = ()
    recipe: str = Field(default=RECIPE, description="whose stages before RL it shares")
    baseline: str = Field(default=BASELINE, description="the arm that it is compared with")


class Plan(Record):
    """The file of arms."""

    every_arm: tuple[str, ...] = Field(description="overrides of all of them: their size")
    arms: dict[str, Arm]

    @classmethod
    def read(cls) -> "Plan":
        return cls.model_validate(tomllib.loads(ARMS_FILE.read_text()))


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
    staleness_mean: float = Field(description="versions, of what was trained, mean over steps")
    over_baseline: Metric | None = Field(
        description="trained minus the baseline arm's of this seed, 95 % by function; None: it is it"
    )
    wanted_reward: float | None = Field(
        default=None, description="half of the baseline's rise; None: not measured"
    )
    seconds_to_reward: float | None = Field(
        default=None, description="wall time of RL up to it; None: not measured, or never reached"
    )
    mismatch_k3: dict[str, float] = Field(
        default={}, description="trainer beside engine, nats, mean over steps; empty: not measured"
    )


def read_rows(path: Path = ROWS) -> dict[tuple[str, int], Row]:
    """What is known, by arm and seed."""
    if not path.exists():
        return {}
    rows = [Row.model_validate_json(line) for line in path.read_text().splitlines()]
    return {(row.arm, row.seed): row for row in rows}


def run_pair(name: str, plan: Plan, seed: int) -> Row:
    """Trains and evaluates; what the home already holds is not done again."""
    arm = plan.arms[name]
    notes = load_settings().home / "ablations"
    notes.mkdir(parents=True, exist_ok=True)
    shared = notes / f"{Path(arm.recipe).stem}-{seed}.shared"
    if not shared.exists():
        _ostinato("mtp-distillation", arm.recipe, seed)
        shared.touch()
    overrides = (*plan.every_arm, *arm.set)
    _ostinato("controls", arm.recipe, seed, keep=SHARED_STAGES, overrides=overrides)
    context = StageContext.open(arm.recipe, seed, RunOptions(overrides=overrides))
    kind = CONTROLS.kind
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
        if parent.kind == REINFORCEMENT.kind
    )
    run = chain.result_of(context, reinforced, ReinforcementResult)
    metrics = context.run_directory(reinforced.kind, reinforced.fingerprint) / METRICS
    start = next(control for control in report.controls if control.name == "start")
    attempts = read_attempts(context, evaluation)
    lines = "".join(f"{row.model_dump_json()}\n" for row in attempts)
    (notes / f"{name}-{seed}.jsonl").write_text(lines)
    steps = [row for row in read_metrics(metrics) if "solve_rate" in row]
    curve = [(float(row["used_seconds"]), float(row["reward_mean"])) for row in steps]
    (notes / f"{name}-{seed}.curve.json").write_text(json.dumps(curve))
    wanted = half_of_rise(json.loads((notes / f"{arm.baseline}-{seed}.curve.json").read_text()))
    return Row(
        arm=name,
        seed=seed,
        overrides=overrides,
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
        staleness_mean=fmean(float(row["staleness_mean"]) for row in steps),
        over_baseline=None
        if name == arm.baseline
        else compare(_read_attempts(notes / f"{arm.baseline}-{seed}.jsonl"), attempts),
        wanted_reward=wanted,
        seconds_to_reward=seconds_to(curve, wanted),
        mismatch_k3=mean_mismatch(steps),
    )


def mean_mismatch(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """k3 of the steps that measured it, by what was compared."""
    values = {
        what: [float(step[name]) for step in steps if name in step]
        for what, name in MISMATCHES.items()
    }
    return {what: fmean(found) for what, found in values.items() if found}


def half_of_rise(baseline: Curve) -> float:
    """The reward in the middle between the first and the last steps."""
    rewards = [reward for _, reward in baseline]
    return (fmean(rewards[:WINDOW_STEPS]) + fmean(rewards[-WINDOW_STEPS:])) / 2


def seconds_to(curve: Curve, wanted: float) -> float | None:
    """Seconds at the end of the first steps in a row whose mean is as high. None: there are none."""
    for end in range(WINDOW_STEPS, len(curve) + 1):
        if fmean(reward for _, reward in curve[end - WINDOW_STEPS : end]) >= wanted:
            return curve[end - 1][0]
    return None


def is_made_here(name: str, seed: int) -> bool:
    """Whether this home has what arms are compared with."""
    notes = load_settings().home / "ablations"
    return all((notes / f"{name}-{seed}{end}").exists() for end in (".jsonl", ".curve.json"))


def compare(first: Iterable[AttemptRow], second: Iterable[AttemptRow]) -> Metric:
    """Paired difference, second minus first, with an interval drawn by function."""
    rates: list[dict[str, list[bool]]] = []
    functions: dict[str, str] = {}
    for rows in (first, second):
        solved: dict[str, list[bool]] = defaultdict(list)
        for row in rows:
            solved[row.problem_id].append(row.solved)
            functions[row.problem_id] = row.function
        rates.append(solved)
    before, after = rates
    if before.keys() != after.keys():
        raise ConfigError(
            f"arms were tried on {len(before)} and {len(after)} problems, not the same"
        )
    names = sorted(before)
    differences = [fmean(after[name]) - fmean(before[name]) for name in names]
    return cluster_bootstrap(
        differences, [functions[name] for name in names], confidence=CONFIDENCE
    )


def _read_attempts(path: Path) -> list[AttemptRow]:
    return [AttemptRow.model_validate_json(line) for line in path.read_text().splitlines()]


def _ostinato(
    flow: str, recipe: str, seed: int, keep: Iterable[str] = (), overrides: Iterable[str] = ()
) -> None:
    command = [*CLI, "run", flow, "--recipe", recipe, "--seed", str(seed)]
    for stage in keep:
        command += ["--keep", stage]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, check=True)


def write_page(plan: Plan, known: Mapping[tuple[str, int], Row]) -> str:
    """The table of all arms in Markdown; cells that were not run say so."""
    seeds = range(max(3, 1 + max((seed for _, seed in known), default=0)))
    heads = ["arm", "all seeds", *(f"seed {seed}" for seed in seeds), "what it changes"]
    lines = [
        "# Ablations of RL on nano",
        "",
        "Written by `python -m tests.benchmarks.ablations` from [ablations.jsonl](ablations.jsonl).",
        f"Every arm: `{' '.join(plan.every_arm)}`, from the SFT checkpoint of its seed. The first line of a",
        "cell is the difference in solve rate to that start, the second the difference to the baseline of the",
        "same seed on the same problems, in points with 95 % intervals by function; `*`: above every control at",
        "equal tokens. Two arms differ if the second interval excludes 0; half its width is about the smallest",
        'difference that can be seen. "All seeds" is the mean of the second lines, with an interval as for',
        "independent runs, although the seeds share their problems. No interval includes the variation between",
        "runs of the same RL.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
    ]
    for name, arm in plan.arms.items():
        cells = [_cell(known.get((name, seed))) for seed in seeds]
        own = [row for (of, _), row in sorted(known.items()) if of == name]
        lines.append(f"| {' | '.join([f'`{name}`', _all_seeds(own), *cells, arm.says])} |")
    lines += [
        "",
        "Wall time of RL until half of the baseline's rise in reward is reached (mean of five consecutive",
        "steps), synchronous over asynchronous: "
        + ", ".join(f"seed {seed} {_speed_up(known, seed)}" for seed in seeds)
        + ".",
    ]
    lines += _mismatch_table(known)
    return "\n".join(lines) + "\n"


def _mismatch_table(known: Mapping[tuple[str, int], Row]) -> list[str]:
    """Table of mismatch KL of the arms that measured it. Empty where none did."""
    having = {key: row.mismatch_k3 for key, row in known.items() if row.mismatch_k3}
    if not having:
        return []
    rows = [
        [f"`{name}`", str(seed), *(_nats(found.get(what)) for what in MISMATCHES)]
        for (name, seed), found in sorted(having.items())
    ]
    return [
        "",
        "Mismatch KL between trainer and engine (k3 in nats, mean over steps): tokens sampled at the trainer's",
        "weights, all trained tokens, and the former scored on the routes that the trainer would choose.",
        "",
        f"| arm | seed | {' | '.join(MISMATCHES)} |",
        f"|{' --- |' * (2 + len(MISMATCHES))}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _nats(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"


def _speed_up(known: Mapping[tuple[str, int], Row], seed: int) -> str:
    rows = [known.get((name, seed)) for name in (SYNCHRONOUS, BASELINE)]
    seconds = [None if row is None else row.seconds_to_reward for row in rows]
    if any(row is None or row.wanted_reward is None for row in rows):
        return "not measured"
    if seconds[0] is None or seconds[1] is None:
        return "not reached"
    return f"{seconds[0] / seconds[1]:.2f}x"


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    text = f"{_points(row.differences['start'])}{'*' if row.gain_counts else ''}"
    if row.over_baseline is not None:
        text += f"<br>{_points(row.over_baseline)}"
    text += (
        f"<br>{row.attempts} attempts, {row.rl_seconds:.0f} s, staleness {row.staleness_mean:.1f}"
    )
    if row.wanted_reward is None:
        return f"{text}<br>time to a reward not measured"
    seconds = row.seconds_to_reward
    reached = "not reached" if seconds is None else f"after {seconds:.0f} s"
    return f"{text}<br>reward {row.wanted_reward:.2f} {reached}"


def over_seeds(differences: Sequence[Metric]) -> Metric:
    """Mean of independent differences, with the interval that follows from theirs."""
    mean = fmean(difference.mean for difference in differences)
    number = len(differences)
    below = math.hypot(*(each.mean - each.low for each in differences)) / number
    above = math.hypot(*(each.high - each.mean for each in differences)) / number
    return Metric(
        mean=mean, low=mean - below, high=mean + above, confidence=CONFIDENCE, count=number
    )


def _all_seeds(rows: Sequence[Row]) -> str:
    found = [row.over_baseline for row in rows if row.over_baseline is not None]
    if len(found) < 2:
        return ""
    return f"{_points(over_seeds(found))}, {len(found)} seeds"


def _points(value: Metric) -> str:
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


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
    plan = Plan.read()
    names = options.arms.split(",") if options.arms else list(plan.arms)
    if unknown := set(names) - plan.arms.keys():
        known_arms = ", ".join(plan.arms)
        parser.error(f"no arm {', '.join(sorted(unknown))}, wanted some of {known_arms}")
    ends = time.monotonic() + 60 * options.minutes
    for seed in range(options.seeds):
        for name in names:
            if (name, seed) in read_rows():
                continue
            baseline = plan.arms[name].baseline
            for wanted in dict.fromkeys((baseline, name)):
                if time.monotonic() >= ends or (wanted != name and is_made_here(wanted, seed)):
                    continue
                row = run_pair(wanted, plan, seed)
                with ROWS.open("a") as file:
                    file.write(row.model_dump_json() + "\n")
    known = read_rows()
    page = write_page(plan, known)
    PAGE.write_text(page)
    print(page)
    counting = sum(row.gain_counts for row in known.values())
    print(json.dumps({"name": "ablations", "runs": len(known), "beat_every_control": counting}))


if __name__ == "__main__":
    main()
