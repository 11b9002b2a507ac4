"""What an attempt spent on finding the function it had to repair, and the comparison of two arms.

The function counts as located when a read_file showed its broken line.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from ostinato.infra.agent.dialects.compact.places import find_place
from ostinato.infra.agent.regions import split_argument
from ostinato.infra.agent.tools.names import READ_FILE, SEARCH_TOOLS
from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord, TurnRecord
from ostinato.tasks.evaluation.statistics import (
    PairedDifference,
    cluster_bootstrap,
    mean,
    mean_metric,
    paired_difference,
    proportion_metric,
)
from ostinato.tasks.records import Metric, Problem, StageRecord, Trajectory

RATES = ("solved", "shown", "located")


class LocatingRow(StageRecord):
    """One attempt. Counts end before the answer that located the function, if any did."""

    problem_id: str
    attempt: int
    function: str = Field(description="repository, path and symbol: what problems share")
    solved: bool
    shown: bool = Field(description="a result of a search named the function's place")
    located: bool = Field(description="a read_file showed the broken line")
    turns: int
    searches: int = Field(description="calls of codebase_search, grep and list_dir")
    generated_tokens: int


class ArmFigures(StageRecord):
    """One arm over all its problems."""

    solved: Metric = Field(description="of attempts; interval over problems")
    shown: Metric = Field(description="its place was named by a search")
    located: Metric
    solved_when_located: float = Field(description="solved among located attempts")
    turns: Metric = Field(description="before the locating answer, over located attempts")
    searches: Metric
    generated_tokens: Metric


class ArmComparison(StageRecord):
    """Two arms on the same problems. Differences are with minus without."""

    arms: dict[str, ArmFigures]
    solved_difference: PairedDifference
    shown_difference: PairedDifference
    located_difference: PairedDifference
    solved_difference_by_function: Metric = Field(
        description="the same mean; its interval draws functions, which share descriptions"
    )
    shown_difference_by_function: Metric
    located_difference_by_function: Metric


def locating_row(problem: Problem, trajectory: Trajectory) -> LocatingRow:
    """The row of one attempt."""
    turns = trajectory.transcript.turns
    found = next(
        (
            index
            for index, turn in enumerate(turns)
            if any(_shows_bug(problem, call) for call in turn.calls)
        ),
        None,
    )
    before = turns if found is None else turns[:found]
    calls = [call for turn in before for call in turn.calls]
    return LocatingRow(
        problem_id=problem.problem_id,
        attempt=trajectory.attempt,
        function=f"{problem.repository}/{problem.path}::{problem.symbol}",
        solved=trajectory.is_solved,
        shown=any(_names_place(problem, turn) for turn in turns),
        located=found is not None,
        turns=len(before),
        searches=sum(call.tool in SEARCH_TOOLS for call in calls),
        generated_tokens=sum(turn.generated_tokens for turn in before),
    )


def _shows_bug(problem: Problem, call: ToolCallRecord) -> bool:
    if call.tool != READ_FILE or call.status is not CallStatus.OK:
        return False
    path, symbol, span = split_argument(call.arguments["path"])
    if path != problem.path:
        return False
    if symbol:
        return symbol == problem.symbol
    lines = [edit.line_number for edit in problem.edits]
    return span is not None and any(span[0] <= line <= span[1] for line in lines)


def _names_place(problem: Problem, turn: TurnRecord) -> bool:
    return any(
        call.tool in SEARCH_TOOLS and find_place(result, problem.path, problem.symbol) is not None
        for call, result in zip(turn.calls, turn.results, strict=True)
    )


def compare_arms(
    with_search: Sequence[LocatingRow], without: Sequence[LocatingRow], *, confidence: float
) -> ArmComparison:
    """Both arms and their paired differences over the problems both tried."""
    solved, shown, located = ((_rates(without, name), _rates(with_search, name)) for name in RATES)
    functions = {row.problem_id: row.function for row in (*with_search, *without)}
    return ArmComparison(
        arms={
            "with": _figures(with_search, confidence),
            "without": _figures(without, confidence),
        },
        solved_difference=paired_difference(*solved, confidence=confidence),
        shown_difference=paired_difference(*shown, confidence=confidence),
        located_difference=paired_difference(*located, confidence=confidence),
        solved_difference_by_function=_by_function(*solved, functions, confidence),
        shown_difference_by_function=_by_function(*shown, functions, confidence),
        located_difference_by_function=_by_function(*located, functions, confidence),
    )


def _rates(rows: Iterable[LocatingRow], name: str) -> dict[str, float]:
    values: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        values[row.problem_id].append(getattr(row, name))
    return {problem: sum(found) / len(found) for problem, found in sorted(values.items())}


def _by_function(
    first: Mapping[str, float],
    second: Mapping[str, float],
    functions: Mapping[str, str],
    confidence: float,
) -> Metric:
    shared = sorted(first.keys() & second.keys())
    return cluster_bootstrap(
        [second[name] - first[name] for name in shared],
        [functions[name] for name in shared],
        confidence=confidence,
    )


def _figures(rows: Sequence[LocatingRow], confidence: float) -> ArmFigures:
    located = [row for row in rows if row.located]
    rates = {name: list(_rates(rows, name).values()) for name in RATES}
    attempts = max(1, len(rows) // max(1, len(rates["solved"])))

    def metric(values: list[float]) -> Metric:
        return mean_metric(values or [0.0], confidence=confidence)

    return ArmFigures(
        solved=proportion_metric(rates["solved"], attempts=attempts, confidence=confidence),
        located=proportion_metric(rates["located"], attempts=attempts, confidence=confidence),
        shown=proportion_metric(rates["shown"], attempts=attempts, confidence=confidence),
        solved_when_located=mean(row.solved for row in located),
        turns=metric([row.turns for row in located]),
        searches=metric([row.searches for row in located]),
        generated_tokens=metric([row.generated_tokens for row in located]),
    )
