"""Error rates of the guard over all eight measures: the part `guard` of `python -m tests.benchmarks.cycles`.

The product groups the simulated users of `guard_world.py` by their earlier sessions and judges each canary. Every row is
of so many canaries: equal candidates and large losses `--cycles`, the others a fifth of it.
"""

import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from ostinato.tasks.realtime.config import MEASURES, CanaryConfig
from ostinato.tasks.realtime.promotion.arm_measures import compare_shares
from ostinato.tasks.realtime.promotion.guard import Advice, judge_canary
from ostinato.tasks.realtime.promotion.observations import CONTROL, MEDIANS, SHARES
from ostinato.tasks.realtime.promotion.user_groups import UserGroups
from tests.benchmarks.guard_world import RATES, Population, World
from tests.benchmarks.repeated import repeat, share

_SESSIONS_PER_HOUR = 360.0
_LOSS, _FACTOR, _LARGE_LOSS = 0.15, 1.4, 0.2
_SMALL_LOSS, _POWER = 0.02, 0.8
_LARGE = {"edit_kept": _LARGE_LOSS}
POISON = (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The guard's verdict on one canary."""

    advice: Advice
    sessions_of_candidate: int  # at the last look; 0: before the first
    hours: float
    is_mismatch: bool


def _worse(measure: str) -> Population:
    return Population(worse={measure: _FACTOR if measure in MEDIANS else _LOSS})


EQUAL = {
    "equal, nobody is known": Population(known=0.0),
    "equal": Population(),
    "equal, half of the users' past false": Population(false_past=0.5),
}
LARGE_LOSSES = {"edits kept -20 points": Population(worse=_LARGE)}
OTHERS = (
    {
        "equal, users do not differ": Population(alike=0.0),
        "equal, 5 % of judgements late": Population(late=0.05),
    }
    | {f"{name} worse": _worse(name) for name in (*SHARES, *MEDIANS)}
    | {f"-20 points, {lies:.0%} lie for it": Population(worse=_LARGE, lies=lies) for lies in POISON}
    | {
        f"equal, {lies:.0%} lie against it": Population(lies=lies, lies_for=CONTROL)
        for lies in POISON
    }
    | {
        f"-20 points, past of {false:.0%} of the users false": Population(
            worse=_LARGE, false_past=false
        )
        for false in POISON
    }
    | {
        "equal, 30 % of sessions for 20 % asked": Population(share_dealt=0.3),
        "-20 points, a third of the users choose their arm": Population(
            worse=_LARGE, steering=0.33
        ),
    }
)


def judge(
    canary: CanaryConfig, population: Population, chance: np.random.Generator, *, known: bool = True
) -> Judgement:
    """One canary from its opening to the guard's verdict. `known`: with groups of alike users."""
    world, guard = World(population, chance), canary.guard
    count = round(1.2 * (guard.minimum_sessions << (guard.looks - 1)) / canary.share)
    report = judge_canary(
        world.observations(count),
        guard,
        canary.share,
        guard.minimum_seconds,
        groups=world.groups if known else UserGroups(),
    )
    judged = [measure for measure in report.measures if measure.name == "edit_judged"]
    arms = [(one.control_count, one.candidate_count) for one in judged] or [(0, 0)]
    return Judgement(
        advice=report.advice,
        sessions_of_candidate=arms[0][1],
        hours=sum(arms[0]) / _SESSIONS_PER_HOUR,
        is_mismatch=report.reason.startswith("sample ratio mismatch"),
    )


def print_guard(
    pool: ProcessPoolExecutor, _recipe: object, canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Table of canaries by population, and the sessions that show a small loss."""
    figures: dict[str, float] = {}
    print(f"{'users of the candidate':<52} {'withdrawn':>20} {'promoted':>20}  after (medians)")
    for name, population in (EQUAL | LARGE_LOSSES | OTHERS).items():
        is_main = name in EQUAL or name in LARGE_LOSSES
        work = partial(judge, canary, population)
        row = _print_row(pool, name, work, count if is_main else max(1, count // 5))
        figures |= {f"{key}: {name}": value for key, value in row.items()}
    for name in (*SHARES, *MEDIANS):
        work = partial(judge, canary, _worse(name), known=False)
        row = _print_row(pool, f"{name} worse, without groups", work, max(1, count // 5))
        figures[f"withdrawn without groups: {name} worse"] = row["withdrawn"]
    return figures | _print_small_loss(pool, canary, max(10, count // 5))


def _print_row(
    pool: ProcessPoolExecutor, name: str, work: Callable[..., object], count: int
) -> dict[str, float]:
    runs: list[Judgement] = repeat(pool, work, name, count)
    gone = [run for run in runs if run.advice is Advice.ROLL_BACK]
    kept = [run.advice is Advice.PROMOTE for run in runs]
    delay = ""
    if gone:
        delay = (
            f"{statistics.median(run.sessions_of_candidate for run in gone):g} sessions, "
            f"{statistics.median(run.hours for run in gone):.1f} h"
        )
        if any(run.is_mismatch for run in gone):
            delay += f", {sum(run.is_mismatch for run in gone)} by the mismatch"
    withdrawn = share([run.advice is Advice.ROLL_BACK for run in runs])
    print(f"{name:<52} {withdrawn:>20} {share(kept):>20}  {delay}", flush=True)
    return {"withdrawn": len(gone) / len(runs), "promoted": sum(kept) / len(runs)}


def _print_small_loss(
    pool: ProcessPoolExecutor, canary: CanaryConfig, count: int
) -> dict[str, float]:
    """Sessions of the candidate with which the last look shows a loss of two points, with and without groups."""
    rate = RATES["edit_judged"]  # a measure that all sessions have
    quantile = statistics.NormalDist().inv_cdf
    level = canary.guard.significance / canary.guard.looks / MEASURES
    distance = quantile(1 - level) + quantile(_POWER)
    both = 1 + canary.share / (1 - canary.share)
    plain = math.ceil((distance / _SMALL_LOSS) ** 2 * rate * (1 - rate) * both)
    widths = repeat(pool, partial(_widths, canary), "widths", 20)
    gain = statistics.mean((narrow / wide) ** 2 for narrow, wide in widths)
    figures: dict[str, float] = {"sessions_with_groups_ratio": gain}
    for known, sessions in ((False, plain), (True, math.ceil(gain * plain))):
        work = partial(_shows, canary, level, sessions, known)
        shown: list[bool] = repeat(pool, work, f"small loss {known}", count)
        name = "with groups" if known else "without groups"
        figures |= {f"sessions {name}": sessions, f"power {name}": float(np.mean(shown))}
        print(
            f"-2 points of edits judged, {name}: {sessions} sessions of the candidate at a share of "
            f"{canary.share:g} show it in {share(shown)}",
            flush=True,
        )
    return figures


def _widths(canary: CanaryConfig, chance: np.random.Generator) -> tuple[float, float]:
    world = World(Population(share_dealt=canary.share), chance)
    sessions = world.sessions(8_000)
    found = []
    for groups in (world.groups, UserGroups()):
        arms = sessions.of_arms("edit_judged", groups)
        interval = compare_shares("edit_judged", arms, 0.01, worse="less").difference
        assert interval is not None
        found.append(interval[1] - interval[0])
    return found[0], found[1]


def _shows(
    canary: CanaryConfig, level: float, sessions: int, known: bool, chance: np.random.Generator
) -> bool:
    population = Population(worse={"edit_judged": _SMALL_LOSS}, share_dealt=canary.share)
    world = World(population, chance)
    seen = world.sessions(round(sessions / canary.share))
    arms = seen.of_arms("edit_judged", world.groups if known else UserGroups())
    return compare_shares("edit_judged", arms, level, worse="less").p_value <= level
