"""Error rates of whole cycles with known true effects: gate, canary, promotion, roll back.

    python -m tests.benchmarks.cycles [--cycles 500] [--quick] [--only gate lines poison guard traffic]

Only the quality of checkpoints, users and the clock are simulated (`cycle_world.py`); the product's
functions decide, with nano's evaluation, gate and feedback and the default canary. Parts:

gate    cycles whose candidate differs by a known effect: what the gate passes, what users then keep
lines   successive cycles on one line, each candidate half a point worse: how far it can fall
poison  cycles that train on users of whom 5 % lie in favour of a hack, and are judged by such users
guard   canaries by what is worse, by lying users and by histories, with all eight measures (`guard_rates.py`)
traffic canaries at a lower solve rate, traffic of odd shapes, and times
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy import stats

from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.infra.platform.ledger import Ledger
from ostinato.tasks.evaluation.gates import gate_candidate
from ostinato.tasks.realtime.config import CanaryConfig
from ostinato.tasks.realtime.promotion.guard import Advice, judge_canary
from ostinato.tasks.realtime.promotion.observations import CANDIDATE, CONTROL, observe, settled
from ostinato.tasks.realtime.promotion.serving_line import ServingLine
from ostinato.tasks.realtime.traffic import FOLLOW_SECONDS
from tests.benchmarks.cycle_lines import (
    POINT,
    LineEnd,
    end_of,
    run_drift,
    run_poisoned,
    sessions_for,
)
from tests.benchmarks.cycle_world import LINE, Traffic, Users, draw_chances, measure, moved
from tests.benchmarks.guard_rates import EQUAL, LARGE_LOSSES, print_guard
from tests.benchmarks.repeated import repeat, share

EFFECTS = (0.0, 2 * POINT, -1 * POINT, -2 * POINT, -5 * POINT, -7 * POINT)
_MAX_FALSE = 0.05
_POWER = 0.8
_RESAMPLES = 1_000
_DRIFT_CYCLES, _POISON_CYCLES = 40, 20

TRAFFIC = {
    "alike": Traffic(),
    "users' solve rate -10 points": Traffic(effect=-10 * POINT),
    "users' solve rate -20 points": Traffic(effect=-20 * POINT),
    "alike, 1 in 10 sessions 30 long": Traffic(long_share=0.1, long_requests=30),
    "-20 points, 1 in 10 sessions 30 long": Traffic(
        effect=-20 * POINT, long_share=0.1, long_requests=30
    ),
    "alike, one user brings half": Traffic(heavy_share=0.5),
    "alike, feedback after 20 min": Traffic(feedback_seconds=1_200.0),
    "-20 points, feedback after 20 min": Traffic(effect=-20 * POINT, feedback_seconds=1_200.0),
    "-20 points, 5 % lie for it": Traffic(effect=-20 * POINT, lie_share=0.05),
    "alike, users of it fall silent (30 -> 60 %)": Traffic(candidate_silent_share=0.6),
    "alike, 30 % dealt for 20 % asked": Traffic(share_dealt=0.30),
}


@dataclass(frozen=True, slots=True)
class CycleEnd:
    """One cycle: what the gate and then its users said."""

    passed: bool
    is_shown_better: bool  # the interval of the difference lies above zero
    promoted: bool


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """One canary from its opening to the guard's word."""

    advice: Advice
    is_mismatch: bool
    sessions: int  # of the candidate
    interactions: int  # of the candidate
    seconds: float  # virtual


def run_cycle(
    recipe: Recipe, canary: CanaryConfig, effect: float, chance: np.random.Generator
) -> CycleEnd:
    """A candidate that is `effect` better on the suite and for users alike."""
    before_P = draw_chances(recipe.evaluation.problems, chance)
    champion = measure("champion", before_P, recipe.evaluation, chance)
    after_P = moved(before_P, effect, chance)
    name = f"candidate-{chance.integers(2**62)}"
    card = measure(name, after_P, recipe.evaluation, chance)
    decision = gate_candidate(card, champion, recipe.cycle.gate)
    promoted = decision.passed and (
        end_of(name, Traffic(effect=effect), canary, recipe, chance) is Advice.PROMOTE
    )
    return CycleEnd(decision.passed, decision.difference.low > 0, promoted)


def run_canary(
    recipe: Recipe, canary: CanaryConfig, traffic: Traffic, chance: np.random.Generator
) -> CanaryRun:
    """The guard's word, and how long it took: it falls with the last answer of a look."""
    users = recipe.cycle.simulated_users
    assert users is not None
    guard, share = canary.guard, canary.share
    name = f"candidate-{chance.integers(2**62)}"
    rows = Users(name, traffic, users, chance).rows(sessions_for(canary))
    ready = settled(rows, guard, rows[-1].created_at + guard.settle_seconds)
    told = observe(ready)
    report = judge_canary(told, guard, share, guard.minimum_seconds)
    sessions = {CONTROL: set(), CANDIDATE: set()}
    (judged,) = (measure for measure in report.measures if measure.name == "edit_judged")
    wanted = min(judged.control_count, judged.candidate_count)
    answers = 0
    while min(map(len, sessions.values())) < wanted:
        sessions[told[answers].arm].add(told[answers].session_id)
        answers += 1
    if report.advice is Advice.ROLL_BACK:
        earlier = judge_canary(told[: answers - 1], guard, share, guard.minimum_seconds)
        if earlier.advice is not Advice.WAIT:
            raise AssertionError(f"{name}: {earlier.advice} one answer before it was withdrawn")
    return CanaryRun(
        advice=report.advice,
        is_mismatch=report.reason.startswith("sample ratio mismatch"),
        sessions=len(sessions[CANDIDATE]),
        interactions=len({seen.interaction_id for seen in told[:answers] if seen.arm == CANDIDATE}),
        seconds=ready[answers - 1].created_at + guard.settle_seconds + FOLLOW_SECONDS,
    )


def run_floor(recipe: Recipe, rate: float, chance: np.random.Generator) -> bool:
    """Whether a first checkpoint of this true solve rate passes."""
    chances_P = moved(draw_chances(recipe.evaluation.problems, chance), 0.0, chance)
    chances_P = moved(chances_P, rate - float(chances_P.mean()), chance)
    card = measure("first", chances_P, recipe.evaluation, chance)
    return gate_candidate(card, None, recipe.cycle.gate).passed


def print_gate(
    pool: ProcessPoolExecutor, recipe: Recipe, canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Table of cycles by true effect, of the floor, and the sizes that would be needed."""
    figures: dict[str, float] = {}
    print(f"{'effect':>8}  {'gate passes':>22}  {'shown better':>22}  {'promoted after A/B':>22}")
    for effect in EFFECTS:
        work = partial(run_cycle, recipe, canary, effect)
        ends: list[CycleEnd] = repeat(pool, work, f"cycle {effect}", count)
        name = f"{100 * effect:+.0f}_points"
        columns = {
            "passed": [end.passed for end in ends],
            "shown_better": [end.is_shown_better for end in ends],
            "promoted": [end.promoted for end in ends],
        }
        figures |= {f"{key}_{name}": float(np.mean(found)) for key, found in columns.items()}
        print(
            f"{100 * effect:+8.0f}",
            *(f"{share(found):>22}" for found in columns.values()),
            sep="  ",
        )
    for rate in (0.03, 0.05, 0.08):
        passed = repeat(pool, partial(run_floor, recipe, rate), f"floor {rate}", count)
        figures[f"floor_passed_{100 * rate:.0f}"] = float(np.mean(passed))
        print(f"first checkpoint of {rate:.0%}: passes the floor {share(passed)}")
    return figures | print_sizes(pool, recipe, min(count, 200))


def print_sizes(pool: ProcessPoolExecutor, recipe: Recipe, count: int) -> dict[str, float]:
    """Problems with which +2 points are shown in 80 % of cycles, and a check of that number."""
    chance = np.random.default_rng(1)
    before_P = draw_chances(200_000, chance)
    after_P = moved(before_P, 2 * POINT, chance)
    attempts = recipe.evaluation.attempts_per_problem
    noise = (before_P * (1 - before_P) + after_P * (1 - after_P)).mean() / attempts
    variance = float(noise + (after_P - before_P).var())
    quantiles = stats.norm.ppf(0.5 + recipe.cycle.gate.confidence / 2) + stats.norm.ppf(_POWER)
    problems = int(np.ceil(quantiles**2 * variance / (2 * POINT) ** 2))
    evaluation = recipe.evaluation.model_copy(update={"problems": problems})
    larger = recipe.model_copy(update={"evaluation": evaluation})
    found: list[bool] = repeat(pool, partial(_is_shown, larger), "sizes", count)
    print(
        f"+2 points shown in {_POWER:.0%} of cycles needs {problems} problems x {attempts} attempts; "
        f"simulated {share(found)}"
    )
    return {"problems_for_power": problems, "power_with_them": float(np.mean(found))}


def _is_shown(recipe: Recipe, chance: np.random.Generator) -> bool:
    before_P = draw_chances(recipe.evaluation.problems, chance)
    after_P = moved(before_P, 2 * POINT, chance)
    cards = [
        measure(name, chances_P, recipe.evaluation, chance)
        for name, chances_P in (("candidate", after_P), ("champion", before_P))
    ]
    return gate_candidate(cards[0], cards[1], recipe.cycle.gate).difference.low > 0


def print_lines(
    pool: ProcessPoolExecutor, recipe: Recipe, _canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Table of lines by drift, with the champions of the recipe and with the last one alone."""
    figures: dict[str, float] = {}
    lines = max(2, count // _DRIFT_CYCLES)
    for drift in (-0.5 * POINT, 0.0, 0.5 * POINT):
        for champions in (1, recipe.cycle.gate.champions):
            work = partial(run_drift, recipe, drift, _DRIFT_CYCLES, champions)
            ends: list[LineEnd] = repeat(pool, work, f"drift {drift}", lines)
            lowest = [end.lowest for end in ends]
            promoted = sum(end.promoted for end in ends) / (lines * _DRIFT_CYCLES)
            name = f"{100 * drift:+.1f}_champions_{champions}"
            figures[f"lowest_{name}"] = min(lowest)
            figures[f"promoted_{name}"] = promoted
            print(
                f"drift {100 * drift:+.1f} a cycle, {champions:>2} champions: {promoted:6.1%} promoted, "
                f"end {100 * statistics.mean(end.end for end in ends):+.1f} points on average, "
                f"lowest {100 * statistics.median(lowest):+.1f} median {100 * min(lowest):+.1f} worst "
                f"({lines} lines x {_DRIFT_CYCLES} cycles)"
            )
    return figures


def print_poison(
    pool: ProcessPoolExecutor, recipe: Recipe, canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Table of lines by the share of interactions that lie, with the recipe's margin and with none.
    `kept_if_honest`: worse candidates that the same gate and honest users keep.
    """
    figures: dict[str, float] = {}
    lines = max(2, count // _POISON_CYCLES)
    strict = with_gate(recipe, margin=0.0)
    for lies, gated in ((0.05, recipe), (0.05, strict), (0.0, recipe), (0.2, recipe)):
        work = partial(run_poisoned, gated, lies, _POISON_CYCLES, canary)
        ends: list[LineEnd] = repeat(pool, work, "poison", lines)
        name = f"{100 * lies:.0f}_percent_margin_{100 * gated.cycle.gate.margin:g}"
        figures |= {
            f"worse_than_margin_{name}": sum(end.shipped_worse_than_margin for end in ends),
            f"worse_{name}": sum(end.shipped_worse for end in ends),
            f"kept_if_honest_{name}": sum(end.kept_if_honest for end in ends),
            f"promoted_{name}": sum(end.promoted for end in ends),
            f"lowest_{name}": min(end.lowest for end in ends),
            f"largest_loss_{name}": max(end.largest_loss for end in ends),
        }
        print(
            f"{lies:4.0%} lie, margin {100 * gated.cycle.gate.margin:g}: of {lines * _POISON_CYCLES} candidates "
            f"{sum(end.offered_worse for end in ends)} worse at all, "
            f"{figures[f'promoted_{name}']:g} promoted, of them {figures[f'worse_{name}']:g} worse at "
            f"all (at most {100 * figures[f'largest_loss_{name}']:.1f} points), if users were honest "
            f"{figures[f'kept_if_honest_{name}']:g}, "
            f"{figures[f'worse_than_margin_{name}']:g} by more than the margin; lines end "
            f"{100 * statistics.mean(end.end for end in ends):+.1f} points, worst "
            f"{100 * figures[f'lowest_{name}']:+.1f}; hacks 5 % -> "
            f"{statistics.mean(end.hack_share for end in ends):.1%}"
        )
    return figures


def print_traffic(
    pool: ProcessPoolExecutor, recipe: Recipe, canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Table of canaries by traffic, and real seconds of a roll back."""
    figures: dict[str, float] = {}
    for name, traffic in TRAFFIC.items():
        traffic = replace(traffic, share_asked=canary.share)
        runs: list[CanaryRun] = repeat(
            pool, partial(run_canary, recipe, canary, traffic), name, count
        )
        gone = [run for run in runs if run.advice is Advice.ROLL_BACK]
        figures[f"withdrawn: {name}"] = len(gone) / len(runs)
        delays = (
            ""
            if not gone
            else (
                f"after {statistics.median(run.sessions for run in gone):g} sessions, "
                f"{statistics.median(run.interactions for run in gone):g} interactions, "
                f"{statistics.median(run.seconds for run in gone) / 3600:.1f} h"
            )
        )
        print(
            f"{name:<46} withdrawn {share([run.advice is Advice.ROLL_BACK for run in runs])}, "
            f"mismatch {sum(run.is_mismatch for run in runs) / len(runs):5.1%}  {delays}"
        )
    seconds = roll_back_seconds(50)
    figures["roll_back_seconds_median"] = statistics.median(seconds)
    figures["roll_back_seconds_most"] = max(seconds)
    print(
        f"roll back on an SQLite ledger: median {1000 * statistics.median(seconds):.1f} ms, "
        f"most {1000 * max(seconds):.1f} ms; the gateway asks every {FOLLOW_SECONDS:g} s"
    )
    return figures


def roll_back_seconds(count: int) -> list[float]:
    """Real seconds until a reader of the ledger sees the champion before."""
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{directory}/ledger.db"
        ledger = Ledger(url).migrate()
        line, reader = (ServingLine(one, LINE, time.time) for one in (ledger, Ledger(url)))
        for number in range(count + 1):
            ledger.promotions.promote(LINE, f"champion-{number}", None, "", time.time())
        found = []
        for number in range(count, 0, -1):
            began = time.perf_counter()
            line.roll_back(f"champion-{number}", "worse")
            assert reader.champion() == f"champion-{number - 1}"
            found.append(time.perf_counter() - began)
        return found


def quick_recipe(resamples: int = _RESAMPLES) -> Recipe:
    """Nano with a quarter of the gate's bootstrap draws: three times as fast, and a bound moves by
    about a tenth of a point.
    """
    return with_gate(load_recipe("nano"), resamples=resamples)


def with_gate(recipe: Recipe, **changes: float) -> Recipe:
    """A recipe with another gate."""
    gate = recipe.cycle.gate.model_copy(update=changes)
    cycle = recipe.cycle.model_copy(update={"gate": gate})
    return recipe.model_copy(update={"cycle": cycle})


PARTS = {
    "gate": print_gate,
    "lines": print_lines,
    "poison": print_poison,
    "guard": print_guard,
    "traffic": print_traffic,
}


def targets_of(figures: dict[str, float], recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Figure -> (seen, at most), as far as it was run."""
    false = {f"withdrawn: {name}": _MAX_FALSE for name in EQUAL}
    false |= {f"promoted: {name}": _MAX_FALSE for name in LARGE_LOSSES}
    wanted = {
        "promoted_-5_points": _MAX_FALSE,
        "promoted_-7_points": _MAX_FALSE,
        "floor_passed_3": _MAX_FALSE,
        "floor_passed_5": _MAX_FALSE,
        "worse_than_margin_5_percent_margin_5": 0,
    } | {f"withdrawn: {name}": _MAX_FALSE for name in TRAFFIC if _is_fair(TRAFFIC[name])}
    wanted |= false
    return {name: (figures[name], most) for name, most in wanted.items() if name in figures}


def _is_fair(traffic: Traffic) -> bool:
    """Whether the arms are alike and dealt out as asked, so that a withdrawal would be false."""
    return (
        traffic.effect == 0
        and traffic.share_dealt == traffic.share_asked
        and traffic.candidate_silent_share == traffic.silent_share
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=500, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="40 of each kind")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    recipe = quick_recipe()
    canary = recipe.cycle.people_canary or CanaryConfig()
    figures: dict[str, float] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for part in options.only:
            count = 40 if options.quick else options.cycles
            figures |= PARTS[part](pool, recipe, canary, count)
    targets = targets_of(figures, recipe)
    wanted = {name: most for name, (_, most) in targets.items()}
    met = all(seen <= most for seen, most in targets.values())
    print(json.dumps({"name": "cycles", "figures": figures, "targets": wanted, "met": met}))


if __name__ == "__main__":
    main()
