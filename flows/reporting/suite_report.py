"""Figures of a suite: a row per slice and model, paired differences, costs, and a plot of score against cost."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from matplotlib.figure import Figure
from pydantic import Field

from ostinato.flows.reporting.tables import NOT_MEASURED, interval, rounded
from ostinato.flows.stages.checkpoints import KINDS
from ostinato.flows.stages.curves import figure_png
from ostinato.flows.stages.declared import ENDPOINT
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.record import Record
from ostinato.tasks.evaluation.statistics import (
    PairedDifference,
    paired_difference,
    paired_slices,
    solve_rates,
)
from ostinato.tasks.records import Metric, Scorecard, SliceScore

ALL = "(all)"  # name of all problems beside the slices


class SuiteFigures(Record):
    """Figures of one or two scorecards of a suite."""

    costs_usd: tuple[dict[str, float | None], ...] = Field(
        description="mean cost of an attempt by slice, for each scorecard; None: no price or no count of prompt tokens"
    )
    differences: dict[str, PairedDifference] = Field(
        description="solve rate by slice, first scorecard minus second; empty: there is no second one"
    )
    points: dict[str, tuple[float, Metric]] = Field(
        description="cost and solve rate of each model of this home that was measured on the suite"
    )
    cost_unit: str = Field(description="unit of the points' costs")


def suite_figures(context: StageContext, cards: Sequence[Scorecard]) -> SuiteFigures:
    """Figures at the recipe's prices. Points are in tokens unless all scorecards have a cost."""
    differences: dict[str, PairedDifference] = {}
    if len(cards) > 1:
        first, second = map(solve_rates, cards)
        differences = {ALL: paired_difference(second, first), **paired_slices(cards[1], cards[0])}
    costs = tuple(_costs(context, card) for card in cards)
    is_priced = all(cost[ALL] is not None for cost in costs)
    rows = [row for kind in (*KINDS, ENDPOINT.kind) for row in context.ledger.artifacts.list(kind)]
    names = [f"{row.kind}/{row.name}@{row.version}" for row in rows]
    earlier = context.ledger.scorecards.of_suite(cards[0].suite, names)
    points: dict[str, tuple[float, Metric]] = {}
    for card in (*(Scorecard.model_validate(row.payload) for row in earlier), *cards):
        cost = _costs(context, card)[ALL] if is_priced else card.generated_tokens.mean
        if cost is not None:
            points[card.checkpoint] = cost, card.average
    return SuiteFigures(
        costs_usd=costs,
        differences=differences,
        points=points,
        cost_unit=f"{'USD' if is_priced else 'generated tokens'} per attempt",
    )


def _costs(context: StageContext, card: Scorecard) -> dict[str, float | None]:
    """Mean cost of an attempt by slice. None without a price for the model or a count of its prompt tokens."""
    prices = context.recipe.prices.items()
    price = next((each for name, each in prices if fnmatchcase(card.checkpoint, name)), None)
    means = {name: part.attempt_means for name, part in _parts(card).items()}
    return {name: price.cost_usd(one) if price and one else None for name, one in means.items()}


def _parts(card: Scorecard) -> dict[str, Scorecard | SliceScore]:
    return {ALL: card, **card.slices}


def slice_rows(cards: Sequence[Scorecard], figures: SuiteFigures | None) -> list[dict[str, str]]:
    """A row for all problems and for each slice, of each scorecard. None: no rows."""
    if figures is None:
        return []
    pairs = list(zip(cards, figures.costs_usd, strict=True))
    return [_row(name, card, costs[name]) for name in _parts(cards[0]) for card, costs in pairs]


def _row(name: str, card: Scorecard, cost: float | None) -> dict[str, str]:
    part, k = _parts(card)[name], card.attempts_per_problem
    means, all_of = part.attempt_means, part.all_of
    assert means is not None
    assert all_of is not None
    return {
        "slice": name,
        "model": card.checkpoint,
        "problems": str(part.average.count),
        "average": interval(part.average),
        f"best of {k}": interval(part.best_of),
        f"all of {k}": interval(all_of),
        "lines changed": rounded(means.changed_lines),
        "generated tokens": rounded(means.generated_tokens),
        "tool calls": rounded(means.tool_calls),
        "turns": rounded(means.turns),
        "seconds": rounded(means.seconds),
        "cost in USD": NOT_MEASURED if cost is None else f"{cost:.3g}",
    }


def difference_rows(figures: SuiteFigures | None) -> list[dict[str, str]]:
    """A row per slice with the first model's solve rate minus the second's on the same problems."""
    differences = {} if figures is None else figures.differences
    return [
        {
            "slice": name,
            "problems": str(found.count),
            "points": f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]",
            "p": f"{found.p_value:.2g}",
        }
        for name, found in differences.items()
    ]


def frontier(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points, as cost and score, with a higher score than every other one of at most their cost."""
    best = -1.0
    for cost, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if score > best:
            best = score
            yield cost, score


def pareto_png(figures: SuiteFigures) -> bytes:
    """A plot of solve rates with intervals against costs, with a line through the frontier."""
    figure = Figure(figsize=(6.4, 4.0), dpi=110)
    axes = figure.subplots()
    for model, (cost, score) in figures.points.items():
        axes.plot((cost, cost), (score.low, score.high), color="tab:blue", linewidth=1.4)
        axes.plot(cost, score.mean, "o", color="tab:blue")
        axes.annotate(model, (cost, score.mean), fontsize=7)
    line = frontier((cost, score.mean) for cost, score in figures.points.values())
    axes.plot(*zip(*line, strict=True), color="tab:orange", linewidth=1.0)
    axes.set_xlabel(figures.cost_unit)
    axes.set_ylabel("solve rate with its interval")
    axes.grid(alpha=0.3)
    return figure_png(figure)
