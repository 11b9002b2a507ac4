"""Means and confidence intervals: problems are the sample, attempts are nested inside them.

Shapes: P problems, C clusters, N resamples.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb, fsum, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import Field

from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.tools.names import RUN_TERMINAL
from ostinato.infra.agent.tools.testing import did_tests_pass
from ostinato.infra.agent.transcript import MODEL_FAULTS, CallStatus, EndReason, Transcript
from ostinato.infra.platform.diffs import count_changed_lines
from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.records import (
    AttemptMeans,
    Metric,
    Problem,
    ProblemScore,
    Scorecard,
    SliceScore,
    StageRecord,
    Trajectory,
)


def mean(values: Iterable[float]) -> float:
    """Mean of the values, or 0 if there are none."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


class AttemptRow(StageRecord):
    """Figures of one attempt."""

    problem_id: str
    attempt: int
    solved: bool
    generated_tokens: int = Field(description="tokens the model sampled")
    turns: int
    tool_calls: int
    broken_calls: int = Field(
        description="calls that did not reach a tool: malformed, unknown, bad arguments"
    )
    function: str = Field(default="", description="the broken function; empty: not recorded")
    edits: int = Field(default=0, description="edits that were carried out")
    first_edit_solved: bool = Field(
        default=False,
        description="the tests passed after the first edit, in the attempt or at its end",
    )
    repeats_edit: bool = Field(default=False, description="the same edit was written twice")
    is_cut: bool = Field(
        default=False, description="ended by a limit or by the harness, not by the model"
    )
    seconds: float | None = Field(
        default=None, description="None, as in the fields below: not recorded"
    )
    prompt_tokens: int | None = None
    changed_lines: int | None = None
    reference_lines: int | None = None


class PairedDifference(Metric):
    """Second minus first over the problems on which both were tried."""

    p_value: float = Field(description="two-sided sign-flip permutation test of no difference")


def attempt_row(trajectory: Trajectory, problem: Problem) -> AttemptRow:
    """The row of one graded trajectory. An attempt without a verdict counts as not solved."""
    turns = trajectory.transcript.turns
    calls = [call for turn in turns for call in turn.calls]
    return AttemptRow(
        problem_id=trajectory.problem_id,
        attempt=trajectory.attempt,
        solved=trajectory.is_solved,
        generated_tokens=sum(turn.generated_tokens for turn in turns),
        turns=len(turns),
        tool_calls=len(calls),
        broken_calls=sum(call.status in MODEL_FAULTS for call in calls),
        function=f"{problem.repository}/{problem.path}::{problem.symbol}",
        is_cut=trajectory.transcript.end_reason is not EndReason.FINISHED,
        seconds=trajectory.finished_at - trajectory.started_at,
        prompt_tokens=_prompt_tokens(trajectory.transcript),
        changed_lines=_changed_lines(trajectory),
        reference_lines=problem.num_changed_lines or None,  # an environment undoes nothing
        **_edits_of(trajectory),
    )


def _prompt_tokens(transcript: Transcript) -> int | None:
    """Tokens that were not sampled. None if the model is served elsewhere and its server counts no tokens."""
    if not transcript.segments:
        return transcript.prompt_tokens
    return sum(len(one.token_ids_T) - one.sampled_tokens for one in transcript.segments)


def _changed_lines(trajectory: Trajectory) -> int | None:
    if trajectory.verdict is None:
        return None
    ignored = trajectory.verdict.ignored_paths
    patches = trajectory.changed_files.items()
    return sum(count_changed_lines(patch) for path, patch in patches if path not in ignored)


def _edits_of(trajectory: Trajectory) -> dict[str, Any]:
    """Fields of an AttemptRow about its edits."""
    written: list[str] = []
    edits, passed_after_first = 0, False
    for turn in trajectory.transcript.turns:
        for index, call in enumerate(turn.calls):
            if call.tool in EDIT_TOOLS:
                written.append(f"{call.tool} {sorted(call.arguments.items())}")
                edits += call.status is CallStatus.OK
            elif call.tool == RUN_TERMINAL and edits == 1 and index < len(turn.results):
                command = call.arguments.get("command", "")
                passed_after_first |= bool(did_tests_pass(command, turn.results[index]))
    return {
        "edits": edits,
        "first_edit_solved": trajectory.is_solved and (edits == 1 or passed_after_first),
        "repeats_edit": len(set(written)) < len(written),
    }


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Unbiased probability that at least one of k attempts solves: 1 - C(n-c, k) / C(n, k) (Chen et
    al. 2021, arXiv 2107.03374). Raises ValueError outside 1 <= k <= n, 0 <= c <= n.
    """
    if not 0 <= solved <= attempts or not 1 <= k <= attempts:
        raise ValueError(
            f"pass@k of attempts={attempts} solved={solved} k={k}: wanted 1 <= k <= n, 0 <= c <= n"
        )
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


def all_of_k(attempts: int, solved: int, k: int) -> float:
    """Unbiased probability that all of k attempts solve, pass^k: C(c, k) / C(n, k) (Yao et al. 2024, arXiv
    2406.12045). Raises ValueError outside 1 <= k <= n, 0 <= c <= n.
    """
    return 1.0 - pass_at_k(attempts, attempts - solved, k)


def mean_metric(values_P: Sequence[float], *, confidence: float = 0.90) -> Metric:
    """Mean of one value per problem, with a Student interval.

    The variance of problem means over P already includes var_between + var_within / K, whatever K.
    """
    values = _at_least_one(values_P)
    mean = float(values.mean())
    if len(values) == 1:
        return Metric(mean=mean, low=mean, high=mean, confidence=confidence, count=1)
    import scipy  # noqa: PLC0415 - other commands import this file only for its records

    error = float(values.std(ddof=1)) / sqrt(len(values))
    half = error * float(scipy.special.stdtrit(len(values) - 1, 0.5 + confidence / 2))
    return Metric(
        mean=mean, low=mean - half, high=mean + half, confidence=confidence, count=len(values)
    )


def proportion_metric(
    rates_P: Sequence[float] | np.ndarray, *, attempts: int, confidence: float = 0.90
) -> Metric:
    """Mean of a 0..1 rate per problem, with a Wilson interval at the effective sample size.

    Effective size = p(1-p) / SE^2, the number of independent coin flips with the same error; at
    least the number of problems less one and at most all attempts. Unlike the normal interval it
    stays inside 0..1 and has a width at 0 % and 100 %. With many problems both agree.
    """
    rates = _at_least_one(rates_P)
    mean, count = float(rates.mean()), len(rates)
    variance = float(rates.var(ddof=1)) / count if count > 1 else 0.0
    size = float(count)
    if variance > 0:
        size = min(max(mean * (1 - mean) / variance, count - 1.0), float(count * attempts))
    low, high = wilson_interval(mean, size, confidence=confidence)
    return Metric(mean=mean, low=low, high=high, confidence=confidence, count=count)


def wilson_interval(rate: float, size: float, *, confidence: float = 0.90) -> tuple[float, float]:
    """Score interval of a proportion `rate` in `size` (possibly fractional) trials."""
    if size <= 0 or not 0 <= rate <= 1:
        raise ValueError(
            f"Wilson interval of rate={rate} size={size}: wanted 0 <= rate <= 1 and size > 0"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (rate + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * sqrt(rate * (1 - rate) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def cluster_bootstrap(
    values_P: Sequence[float], clusters_P: Sequence[str], *, confidence: float = 0.90
) -> Metric:
    """Mean over problems with correlated errors inside clusters (functions, training seeds).

    Whole clusters are drawn with replacement, so that the interval widens when few clusters
    disagree.
    """
    values = _at_least_one(values_P)
    if len(values) != len(clusters_P):
        raise ValueError(
            f"cluster bootstrap of {len(values)} values and {len(clusters_P)} clusters: wanted "
            "equal numbers"
        )
    names, index_P = np.unique(np.asarray(clusters_P), return_inverse=True)
    sums_C = np.bincount(index_P, weights=values)
    counts_C = np.bincount(index_P)
    picks_NC = np.random.default_rng(0).integers(0, len(names), size=(4_000, len(names)))
    means_N = sums_C[picks_NC].sum(axis=1) / counts_C[picks_NC].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means_N, [tail, 1 - tail])
    return Metric(
        mean=float(values.mean()),
        low=float(low),
        high=float(high),
        confidence=confidence,
        count=len(values),
    )


def paired_difference(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    confidence: float = 0.90,
    resamples: int = 4_000,
    seed: int = 0,
) -> PairedDifference:
    """Mean of second - first over shared problems: bootstrap interval, permutation p value."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise GradingError(
            f"paired difference: no shared problem among {len(first)} and {len(second)}, wanted "
            "at least 1"
        )
    differences = np.array([second[name] - first[name] for name in shared])
    mean = float(differences.mean())
    if np.all(differences == differences[0]):
        # without variation resampling has no effect: the interval is the value itself
        low, high = mean, mean
        p_value = 1.0 if mean == 0 else float(2.0 ** (1 - len(shared)))
    else:
        import scipy  # noqa: PLC0415 - as above

        draws = np.random.default_rng(seed)
        interval = scipy.stats.bootstrap(
            (differences,),
            np.mean,
            n_resamples=resamples,
            confidence_level=confidence,
            method="percentile",
            vectorized=True,
            rng=draws,
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
        p_value = float(
            scipy.stats.permutation_test(
                (differences,),
                np.mean,
                permutation_type="samples",
                n_resamples=resamples,
                vectorized=True,
                rng=draws,
            ).pvalue
        )
    return PairedDifference(
        mean=mean,
        low=low,
        high=high,
        confidence=confidence,
        count=len(shared),
        p_value=min(p_value, 1.0),
    )


def group_by_problem(rows: Iterable[AttemptRow]) -> dict[str, list[AttemptRow]]:
    """The rows of each problem, ordered by its id."""
    found: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in rows:
        found[row.problem_id].append(row)
    return dict(sorted(found.items()))


def scorecard_from(
    rows: Iterable[AttemptRow],
    *,
    suite: str,
    checkpoint: str,
    temperature: float,
    confidence: float = 0.90,
    slices: Mapping[str, Sequence[str]] | None = None,
) -> Scorecard:
    """One scorecard of all attempts. Its id is a hash of suite, checkpoint, temperature and scores.

    `best_of` is unbiased pass@k and `all_of` unbiased pass^k, where k is the smallest number of attempts at a
    problem. `slices`: ids of problems by slice; slices without an attempted problem are left out.
    """
    by_problem = group_by_problem(rows)
    if not by_problem:
        raise GradingError(f"scorecard of {checkpoint} on {suite}: 0 attempts, wanted at least 1")
    problems = tuple(_problem_score(name, attempts) for name, attempts in by_problem.items())
    k = min(score.attempts for score in problems)
    every = [row for attempts in by_problem.values() for row in attempts]
    calls = sum(row.tool_calls for row in every)
    broken = sum(score.broken_calls for score in problems)

    def over_problems(values: Iterable[float]) -> Metric:
        return mean_metric(list(values), confidence=confidence)

    body = {
        "suite": suite,
        "checkpoint": checkpoint,
        "temperature": temperature,
        "problems": [score.model_dump(mode="json") for score in problems],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    return Scorecard(
        scorecard_id=f"scorecard-{digest}",
        suite=suite,
        checkpoint=checkpoint,
        attempts_per_problem=k,
        temperature=temperature,
        **_rates(problems, k, confidence),
        generated_tokens=over_problems(score.mean_generated_tokens for score in problems),
        turns=over_problems(score.mean_turns for score in problems),
        tool_calls=over_problems(score.mean_tool_calls for score in problems),
        broken_call_ratio=broken / calls if calls else 0.0,
        first_edit_ratio=mean(row.first_edit_solved for row in every),
        cut_ratio=mean(row.is_cut or row.repeats_edit for row in every),
        attempt_means=_attempt_means(every),
        solved_attempt_means=_attempt_means([row for row in every if row.solved]),
        problems=problems,
        slices={
            name: _slice_score([by_problem[one] for one in ids if one in by_problem], k, confidence)
            for name, ids in (slices or {}).items()
            if not by_problem.keys().isdisjoint(ids)
        },
    )


def _rates(problems: Sequence[ProblemScore], k: int, confidence: float) -> dict[str, Any]:
    """Fields `average`, `best_of` and `all_of` of a score."""
    most = max(score.attempts for score in problems)
    rates = {
        "average": [score.solved / score.attempts for score in problems],
        "best_of": [pass_at_k(score.attempts, score.solved, k) for score in problems],
        "all_of": [all_of_k(score.attempts, score.solved, k) for score in problems],
    }
    draws = {name: most if name == "average" else max(1, most // k) for name in rates}
    return {
        name: proportion_metric(values, attempts=draws[name], confidence=confidence)
        for name, values in rates.items()
    }


def _slice_score(problems: Sequence[Sequence[AttemptRow]], k: int, confidence: float) -> SliceScore:
    scores = [_problem_score(rows[0].problem_id, rows) for rows in problems]
    return SliceScore(
        **_rates(scores, k, confidence),
        attempt_means=_attempt_means([row for rows in problems for row in rows]),
        problem_ids=tuple(score.problem_id for score in scores),
    )


def paired_slices(
    first: Scorecard, second: Scorecard, **options: Any
) -> dict[str, PairedDifference]:
    """Paired difference, second minus first, of each slice that both scorecards have. `options`: those of
    `paired_difference`.
    """
    before, after = solve_rates(first), solve_rates(second)
    return {
        name: paired_difference(
            {one: before[one] for one in first.slices[name].problem_ids}, after, **options
        )
        for name in second.slices
        if name in first.slices
    }


def _attempt_means(rows: Sequence[AttemptRow]) -> AttemptMeans | None:
    if not rows:
        return None
    names = AttemptMeans.model_fields.keys() & AttemptRow.model_fields.keys() - {"schema_version"}
    recorded = {name: [getattr(row, name) for row in rows] for name in names}
    values = {
        name: [value for value in found if value is not None] for name, found in recorded.items()
    }
    # fsum does not depend on the order of the attempts
    means = {name: fsum(found) / len(found) if found else None for name, found in values.items()}
    return AttemptMeans.model_validate({"attempts": len(rows), **means})


def solve_rates(scorecard: Scorecard) -> dict[str, float]:
    return {score.problem_id: score.solved / score.attempts for score in scorecard.problems}


def _problem_score(problem_id: str, rows: Sequence[AttemptRow]) -> ProblemScore:
    count = len(rows)
    if len({row.attempt for row in rows}) != count:
        raise GradingError(
            f"problem {problem_id}: attempt numbers repeat in {count} rows, wanted one row per "
            "attempt"
        )
    return ProblemScore(
        problem_id=problem_id,
        attempts=count,
        solved=sum(row.solved for row in rows),
        mean_generated_tokens=sum(row.generated_tokens for row in rows) / count,
        mean_turns=sum(row.turns for row in rows) / count,
        mean_tool_calls=sum(row.tool_calls for row in rows) / count,
        broken_calls=sum(row.broken_calls for row in rows),
    )


def _at_least_one(values_P: Sequence[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(values_P, dtype=np.float64)
    if values.size == 0:
        raise GradingError("mean over 0 problems, wanted at least 1")
    return values
