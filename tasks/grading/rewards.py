"""The reward of a judged attempt, with named terms.

A term is a value times a signed weight. `total` is the sum of the terms in their fixed order. Every attempt
is graded, even one that breaks its calls, edits nothing or runs out of turns. Of the built-in terms only
correctness is ever positive. Installed packages add terms through the entry point group `ostinato.rewards`,
each a `Reward`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

import numpy as np

from ostinato.infra.agent.transcript import Segment, Transcript, TurnRecord
from ostinato.infra.platform.errors import GradingError, boundary
from ostinato.infra.platform.plugins import bounded_number
from ostinato.tasks.grading.change import JudgedAttempt
from ostinato.tasks.grading.cheating.monitors import COMMENT_RATIO
from ostinato.tasks.grading.conduct import (
    count_broken_calls,
    count_questions,
    find_message_faults,
    is_verified,
    last_todos,
)
from ostinato.tasks.grading.config import REWARDS, EffortWeights, GradingConfig, Harm
from ostinato.tasks.records import RewardReport

Reward = Callable[[JudgedAttempt], float | Sequence[float]]
"""A further term: a measurement of one attempt, weighted by `[grading.rewards]`. A sequence measures each segment of
the transcript (each branch of a foreign program's session); the attempt's value is then their mean.
"""
_FINAL_LIMIT_CHARACTERS = 1200  # a longer closing message is a fault
_MAX_COUNTED = 5  # further broken calls, lints, open items and questions cost nothing
_NO_FLAGS: Mapping[str, str] = MappingProxyType({})


def compute_reward(
    attempt: JudgedAttempt,
    config: GradingConfig,
    *,
    new_lints: int = 0,
    flags: Mapping[str, str] = _NO_FLAGS,
) -> RewardReport:
    """The reward with all terms in a fixed order, even those that are zero."""
    values = _values(attempt, config, new_lints, len(flags))
    weights = term_weights(config)
    measured = {name: _measure(name, attempt, weights[name]) for name in config.rewards}
    values |= {name: fmean(found or [0.0]) for name, found in measured.items()}
    terms = {name: weights[name] * value for name, value in values.items()}
    offsets = np.zeros(len(attempt.transcript.segments))
    for name, found in measured.items():
        if len(found) > 1:
            offsets += weights[name] * (np.asarray(found) - values[name])
    return RewardReport(
        total=sum(terms.values()),
        segments=tuple(offsets.tolist()) if offsets.any() else (),
        terms=terms,
        values=values,
        weights=weights,
        flags=dict(sorted(flags.items())),
    )


def term_weights(config: GradingConfig) -> dict[str, float]:
    """The signed weight of every term. Of the built-in terms only correctness has a positive weight."""
    return {
        "correctness": config.correctness,
        "length": -config.length,
        "broken_calls": -config.broken_call,
        "no_edit": -config.no_edit,
        "unverified": -config.unverified,
        "style": -config.style,
        "comments": -config.comments,
        "communication": -config.communication,
        "open_todos": -config.open_todo,
        "needless_questions": -config.needless_question,
        "missing_question": -config.missing_question,
        "flagged": -config.flagged,
        # a harm that refuses a pass costs its correctness and nothing else
        **{
            _harm_term(harm): 0.0 if charge == "refuse" else -charge
            for harm, charge in config.harms.charges.items()
        },
        **config.rewards,
    }


def _measure(name: str, attempt: JudgedAttempt, weight: float) -> list[float]:
    """One value for the attempt, or one for each segment. GradingError unless each is a bounded number."""
    reward: Reward = REWARDS.load(name)
    num_segments = len(attempt.transcript.segments)
    with boundary(GradingError, f"reward {name}"):
        try:
            measured = reward(_copy_records(attempt))
        except SystemExit as error:
            raise GradingError(
                f"reward {name} exits with {error.code!r}, wanted a number"
            ) from None
        is_series = isinstance(measured, list | tuple)
        if is_series and len(measured) != num_segments:
            raise GradingError(
                f"reward {name} is {len(measured)} numbers, wanted one, or {num_segments}: one per segment"
            )
        return [
            bounded_number(f"reward {name}", value, weight)
            for value in (measured if is_series else [measured])
        ]


def _copy_records(attempt: JudgedAttempt) -> JudgedAttempt:
    """The attempt with records of its own, since a package may change arrays and tables in them."""
    return JudgedAttempt(
        replace(attempt.change, problem=deepcopy(attempt.change.problem)),
        deepcopy(attempt.verdict),
        deepcopy(attempt.transcript),
    )


def _values(
    attempt: JudgedAttempt, config: GradingConfig, new_lints: int, num_flags: int
) -> dict[str, float]:
    """The measurement of each term, before its weight."""
    verdict, change, transcript = attempt.verdict, attempt.change, attempt.transcript
    problem = change.problem
    effort = total_effort(measure_effort(transcript), config.effort)
    faults = find_message_faults(
        transcript,
        passed=verdict.passed,
        has_edit=change.has_edit or problem.reply is not None,
        limit_characters=_FINAL_LIMIT_CHARACTERS,
    )
    questions = count_questions(transcript)
    num_open = sum(item.is_open for item in last_todos(transcript))
    # If only the user can tell, the first question is right.
    needless = max(0, questions - int(problem.question_warranted))
    is_missing = problem.question_warranted and questions == 0 and not verdict.passed
    return {
        "correctness": float(verdict.passed),
        "length": length_penalty(effort, config.length_k, config.length_q),
        "broken_calls": float(min(count_broken_calls(transcript), _MAX_COUNTED)),
        "no_edit": float(not change.has_edit and problem.reply is None),
        "unverified": float(not is_verified(transcript)),
        "style": float(min(new_lints, _MAX_COUNTED)),
        "comments": max(0.0, change.comment_ratio - COMMENT_RATIO),
        "communication": float(len(faults)),
        "open_todos": float(min(num_open, _MAX_COUNTED)),
        "needless_questions": float(min(needless, _MAX_COUNTED)),
        "missing_question": float(is_missing),
        "flagged": float(num_flags),
        **{_harm_term(harm): float(harm.value in verdict.harms) for harm in Harm},
    }


def _harm_term(harm: Harm) -> str:
    return f"harm_{harm.value}"


def length_penalty(effort: float, k: float, q: float) -> float:
    """C_{k,q}(effort). ValueError unless effort >= 0, k > 0 and q >= 0."""
    if effort < 0 or k <= 0 or q < 0:
        raise ValueError(
            f"length penalty of effort {effort} with k {k}, q {q}: "
            "wanted effort >= 0, k > 0, q >= 0"
        )
    if k * effort < 1e-290:
        return effort  # the slope at 0 is 1, and subnormal products would lose their digits
    growth = math.log1p(k * effort)
    exponent = (1.0 - q) * growth
    if q > 1.0:
        # Near the bound 1 / (k (q - 1)) a product of rounded factors would fall by an ulp as the
        # effort grows. This form never falls.
        return -math.expm1(exponent) / (k * (q - 1.0))
    # expm1(e)/e -> 1 as e -> 0, so near q = 1 nothing cancels.
    return growth / k * (math.expm1(exponent) / exponent if exponent else 1.0)


def measure_effort(transcript: Transcript) -> dict[str, float]:
    """The six kinds of effort of one attempt, by field name of EffortWeights."""
    effort = dict.fromkeys(EffortWeights.model_fields, 0.0)
    for turn in transcript.turns:
        if turn.calls:
            thinking = turn.generated_tokens * _thinking_share(turn)
            effort["thinking_tokens"] += thinking
            effort["call_tokens"] += turn.generated_tokens - thinking
        else:
            effort["final_tokens"] += turn.generated_tokens
        effort["tool_calls"] += len(turn.calls)
    effort["turns"] = float(len(transcript.turns))
    effort["output_tokens"] = float(sum(map(_read_tokens, transcript.segments)))
    return effort


def total_effort(effort: dict[str, float], weights: EffortWeights) -> float:
    """x: the weighted sum, in the order of EffortWeights, so that the order of `effort` has no effect."""
    return sum(effort[name] * weight for name, weight in weights.model_dump().items())


def _thinking_share(turn: TurnRecord) -> float:
    """Share of a turn's text before its first call, in characters. Tokens are split in this proportion."""
    start = turn.text.find(f"<{turn.calls[0].tool}>")
    return start / len(turn.text) if start > 0 else 0.0


def _read_tokens(segment: Segment) -> int:
    """Tokens after the first sampled one that the model did not sample."""
    sampled = np.flatnonzero(segment.loss_mask_T)
    if len(sampled) == 0:
        return 0
    return int(len(segment.loss_mask_T) - sampled[0] - len(sampled))
