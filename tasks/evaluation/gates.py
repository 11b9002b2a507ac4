"""The release gate: users get a candidate only if it is not worse than the champion."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ostinato.infra.platform.errors import GradingError
from ostinato.tasks.evaluation.config import GateConfig
from ostinato.tasks.evaluation.statistics import (
    PairedDifference,
    paired_difference,
    paired_slices,
    solve_rates,
)
from ostinato.tasks.records import GateCheck, GateDecision, Metric, Scorecard


def gate_candidate(
    candidate: Scorecard,
    champion: Scorecard | None,
    config: GateConfig,
    earlier: Sequence[Scorecard] = (),
    training: Sequence[GateCheck] = (),
) -> GateDecision:
    """Passes if the lower bound of (candidate - champion) is above -margin and other checks pass.

    Each slice of `slice_margins` is compared in the same way, with its own margin.
    The same margin applies to the best of the `earlier` champions on the same problems. Without a
    champion the lower bound of the candidate's own average must reach `floor`. The checks of its
    `training` must have passed too.
    """
    config.refuse_slices(f"suite {candidate.suite}", candidate.slices)
    if champion is None:
        return _first_checkpoint(candidate, config, training)
    _same_suite(candidate, champion)
    paired = _difference(candidate, champion, config)
    rates = (champion.average.mean, candidate.average.mean)
    checks = (
        _enough_problems(paired.count, config),
        _not_worse("solve_rate_not_worse", "solve rate", rates, paired, config.margin),
        _broken_calls(candidate, champion, config),
        _generated_tokens(candidate, champion, config),
    )
    best = max((champion, *earlier), key=lambda card: card.average.mean)
    if best.checkpoint != champion.checkpoint:
        _same_suite(candidate, best)
        lost = _difference(candidate, best, config)
        name = f"solve rate since {best.checkpoint}, best of the last {config.champions} champions,"
        rates = (best.average.mean, candidate.average.mean)
        checks += (_not_worse("cumulative_loss", name, rates, lost, config.margin),)
    checks += tuple(_slices_not_worse(candidate, champion, config))
    return _decision(candidate, champion, paired, (*checks, *training))


def _difference(candidate: Scorecard, champion: Scorecard, config: GateConfig) -> PairedDifference:
    return paired_difference(solve_rates(champion), solve_rates(candidate), **_draws(config))


def _draws(config: GateConfig) -> dict[str, Any]:
    return config.model_dump(include={"confidence", "resamples", "seed"})


def _slices_not_worse(
    candidate: Scorecard, champion: Scorecard, config: GateConfig
) -> Iterator[GateCheck]:
    pairs = paired_slices(champion, candidate, **_draws(config))
    for name, margin in config.slice_margins.items():
        check = _enough_problems(pairs[name].count, config, f"slice {name}: ")
        yield check.model_copy(update={"name": f"{check.name}_{name}"})
        rates = [card.slices[name].average.mean for card in (champion, candidate)]
        yield _not_worse(f"slice_{name}", f"slice {name}", rates, pairs[name], margin)


def _not_worse(
    name: str, measure: str, rates: Sequence[float], paired: PairedDifference, margin: float
) -> GateCheck:
    before, after = rates
    return GateCheck(
        name=name,
        value=paired.low,
        threshold=-margin,
        passed=paired.low > -margin,
        detail=(
            f"{measure} {_percent(before)} -> {_percent(after)}: difference "
            f"{_points(paired.mean)}, {paired.confidence:.0%} interval {_points(paired.low)} to "
            f"{_points(paired.high)}, p={paired.p_value:.2g}, margin {_points(-margin)}"
        ),
    )


def _first_checkpoint(
    candidate: Scorecard, config: GateConfig, training: Sequence[GateCheck]
) -> GateDecision:
    average = candidate.average
    checks = (
        _enough_problems(average.count, config),
        GateCheck(
            name="solve_rate_floor",
            value=average.low,
            threshold=config.floor,
            passed=average.low >= config.floor,
            detail=(
                f"no champion to compare with; solve rate {_percent(average.mean)}, lower bound "
                f"{_percent(average.low)}, "
                f"floor {_percent(config.floor)}"
            ),
        ),
    )
    return _decision(candidate, None, average, (*checks, *training))


def _same_suite(candidate: Scorecard, champion: Scorecard) -> None:
    if candidate.suite != champion.suite or candidate.temperature != champion.temperature:
        raise GradingError(
            f"gate of {candidate.checkpoint}: suite {candidate.suite} at temperature "
            f"{candidate.temperature}, wanted "
            f"the champion's {champion.suite} at {champion.temperature} ({champion.scorecard_id})"
        )
    ours = {score.problem_id for score in candidate.problems}
    theirs = {score.problem_id for score in champion.problems}
    if ours != theirs:
        odd = sorted(ours ^ theirs)
        raise GradingError(
            f"gate of {candidate.checkpoint}: {len(odd)} problems are on one scorecard only "
            f"(first {odd[0]}), wanted "
            f"the same problems on {candidate.scorecard_id} and {champion.scorecard_id}"
        )


def _enough_problems(count: int, config: GateConfig, of: str = "") -> GateCheck:
    return GateCheck(
        name="enough_problems",
        value=float(count),
        threshold=float(config.minimum_problems),
        passed=count >= config.minimum_problems,
        detail=f"{of}{count} problems compared, at least {config.minimum_problems} wanted",
    )


def _at_most(name: str, value: float, threshold: float, detail: str) -> GateCheck:
    return GateCheck(
        name=name, value=value, threshold=threshold, passed=value <= threshold, detail=detail
    )


def _broken_calls(candidate: Scorecard, champion: Scorecard, config: GateConfig) -> GateCheck:
    before, value = champion.broken_call_ratio, candidate.broken_call_ratio
    threshold = before + config.broken_call_ratio_increase
    detail = f"{_percent(before)} -> {_percent(value)}, at most {_percent(threshold)}"
    return _at_most("broken_calls", value, threshold, f"broken tool calls {detail}")


def _generated_tokens(candidate: Scorecard, champion: Scorecard, config: GateConfig) -> GateCheck:
    before, value = champion.generated_tokens.mean, candidate.generated_tokens.mean
    threshold = before * config.generated_tokens_growth
    detail = f"{before:.0f} -> {value:.0f}, at most {threshold:.0f}"
    return _at_most("generated_tokens", value, threshold, f"generated tokens per attempt {detail}")


def _decision(
    candidate: Scorecard,
    champion: Scorecard | None,
    difference: Metric,
    checks: tuple[GateCheck, ...],
) -> GateDecision:
    failed = [check for check in checks if not check.passed]
    shown = failed if failed else [checks[1]]
    reason = ("refused: " if failed else "passed: ") + "; ".join(check.detail for check in shown)
    champion_id = champion.scorecard_id if champion is not None else None
    body = {
        "candidate": candidate.scorecard_id,
        "champion": champion_id,
        "checks": [check.model_dump(mode="json") for check in checks],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    return GateDecision(
        gate_id=f"gate-{digest}",
        candidate=candidate.checkpoint,
        candidate_scorecard_id=candidate.scorecard_id,
        champion=champion.checkpoint if champion is not None else None,
        champion_scorecard_id=champion_id,
        passed=not failed,
        difference=difference,
        checks=checks,
        reason=reason,
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _points(ratio: float) -> str:
    return f"{100 * ratio:+.1f} points"
