"""Controls of an RL claim, from attempts of the checkpoint that RL began with (the start).

`restart`: attempts of the start one after another, until the tests pass or the tokens are used up.
`best of n`: n whole attempts, of which one must pass. Both get the tokens that the trained
checkpoint uses on average; between two whole numbers of attempts, a share of the problems gets the
larger number. A restart decides by the graded tests, so it is a control only if an agent sees
those. Checkpoints that other training made from the start are compared attempt by attempt.

A gain counts only over controls that could spend these tokens: if all recorded attempts of the
start together use fewer, it is unknown what more attempts would solve. If the trained checkpoint
uses fewer tokens than one attempt of the start, neither policy can afford a second attempt: both
then equal the start, which uses more tokens, and a gain over it counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from pydantic import Field

from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.statistics import (
    AttemptRow,
    cluster_bootstrap,
    group_by_problem,
    mean,
    pass_at_k,
)
from ostinato.tasks.records import Metric, StageRecord

CONFIDENCE = 0.95

# (probability of a solution, generated tokens) of a policy that may make k attempts at a problem
Policy = Callable[[Sequence[AttemptRow], int], tuple[float, float]]


class Control(StageRecord):
    """One policy's figures on the problems, and the trained checkpoint's difference to it."""

    name: str
    solved: float = Field(description="mean over problems")
    first_edit_solved: float | None = Field(description="None: not a single attempt's figure")
    generated_tokens: float
    tool_calls: float | None
    cut_ratio: float | None = Field(
        description="attempts that ended at a limit or repeated an edit; None as above"
    )
    has_equal_tokens: bool = Field(
        description="false: all attempts of the policy together use fewer tokens than the trained "
        "checkpoint; always true for a checkpoint, which has no token budget"
    )
    difference: Metric | None = Field(
        description="trained minus this, with functions as clusters; None: the trained one itself"
    )


class ControlReport(StageRecord):
    """A trained checkpoint and its controls."""

    trained: Control
    controls: tuple[Control, ...]
    gain_counts: bool = Field(
        description="every difference has its whole interval above 0, and each policy could spend the "
        "trained checkpoint's tokens (one attempt with more tokens suffices); a claim needs three seeds"
    )


def compare_with_controls(
    start: Iterable[AttemptRow],
    trained: Iterable[AttemptRow],
    others: Mapping[str, Iterable[AttemptRow]] | None = None,
) -> ControlReport:
    """Compares the trained checkpoint with its start, with the start at equal tokens, and with
    other checkpoints, by name.

    No gain counts if a policy used up its attempts before these tokens. A policy that cannot afford
    a second attempt equals the start, and a gain over it counts.
    """
    after = group_by_problem(trained)
    checkpoints = {"start": start, **(others or {})}
    measured = {name: group_by_problem(rows) for name, rows in checkpoints.items()}
    for name, tried in measured.items():
        if tried.keys() != after.keys():
            raise GradingError(
                f"controls: {name} was tried on {len(tried)} problems, trained on {len(after)}, "
                f"{len(tried.keys() & after.keys())} of them shared, wanted the same ones"
            )
    rates = _solve_rates(after)
    tokens = mean(mean(row.generated_tokens for row in rows) for rows in after.values())
    clusters = [rows[0].function or name for name, rows in sorted(after.items())]

    def against(values: Mapping[str, float]) -> Metric:
        differences = [rates[name] - values[name] for name in sorted(rates)]
        return cluster_bootstrap(differences, clusters, confidence=CONFIDENCE)

    controls = [
        _measured(name, tried, against(_solve_rates(tried))) for name, tried in measured.items()
    ]
    for name, policy in (("restart", restart), ("best of n", best_of)):
        values, spent, is_equal = spend(measured["start"], policy, tokens)
        controls.append(
            Control(
                name=f"{name} at equal tokens",
                solved=mean(values.values()),
                first_edit_solved=None,
                generated_tokens=spent,
                tool_calls=None,
                cut_ratio=None,
                has_equal_tokens=is_equal,
                difference=against(values),
            )
        )
    return ControlReport(
        trained=_measured("trained", after, None),
        controls=tuple(controls),
        gain_counts=all(
            control.has_equal_tokens
            and control.difference is not None
            and control.difference.low > 0
            for control in controls
        ),
    )


def restart(rows: Sequence[AttemptRow], most: int) -> tuple[float, float]:
    """At most `most` attempts, none after a solved one. Means over all orders of the rows."""
    attempts, solved = len(rows), sum(row.solved for row in rows)
    failed = [row.generated_tokens for row in rows if not row.solved]
    solving = sum(row.generated_tokens for row in rows if row.solved)
    spent = 0.0
    for number in range(min(most, len(failed) + 1)):
        # made if all attempts before failed; it is any remaining row, and all solving rows remain
        reached = 1.0 - pass_at_k(attempts, solved, number) if number else 1.0
        left = mean(failed) * (len(failed) - number) + solving
        spent += reached * left / (attempts - number) if attempts > number else 0.0
    return pass_at_k(attempts, solved, most), spent


def best_of(rows: Sequence[AttemptRow], most: int) -> tuple[float, float]:
    """`most` attempts, all of which are made."""
    solved = sum(row.solved for row in rows)
    tokens = mean(row.generated_tokens for row in rows)
    return pass_at_k(len(rows), solved, most), most * tokens


def spend(
    by_problem: Mapping[str, Sequence[AttemptRow]], policy: Policy, tokens: float
) -> tuple[dict[str, float], float, bool]:
    """(solve rate of each problem if the policy spends `tokens` on average, tokens it spends,
    whether it could spend `tokens`). It makes at least one attempt, even if that uses more tokens.
    """
    most = min(len(rows) for rows in by_problem.values())
    steps = [
        {name: policy(rows, attempts) for name, rows in by_problem.items()}
        for attempts in range(1, most + 1)
    ]
    costs = [mean(cost for _, cost in step.values()) for step in steps]
    chosen, share = steps[-1], 0.0
    other = chosen
    for (cost, step), (next_cost, next_step) in pairwise(zip(costs, steps, strict=True)):
        if tokens < next_cost:
            chosen, other = step, next_step
            share = max(0.0, (tokens - cost) / (next_cost - cost))
            break

    def mixed(index: int, name: str) -> float:
        return (1 - share) * chosen[name][index] + share * other[name][index]

    values = {name: mixed(0, name) for name in by_problem}
    return values, mean(mixed(1, name) for name in by_problem), tokens <= costs[-1]


def _measured(
    name: str, by_problem: Mapping[str, Sequence[AttemptRow]], difference: Metric | None
) -> Control:
    rows = [row for some in by_problem.values() for row in some]
    return Control(
        name=name,
        solved=mean(mean(row.solved for row in some) for some in by_problem.values()),
        first_edit_solved=mean(row.first_edit_solved for row in rows),
        generated_tokens=mean(row.generated_tokens for row in rows),
        tool_calls=mean(row.tool_calls for row in rows),
        cut_ratio=mean(row.is_cut or row.repeats_edit for row in rows),
        has_equal_tokens=True,
        difference=difference,
    )


def _solve_rates(by_problem: Mapping[str, Sequence[AttemptRow]]) -> dict[str, float]:
    return {name: mean(row.solved for row in rows) for name, rows in by_problem.items()}
