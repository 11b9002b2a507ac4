"""The length penalty C_{k,q}(x) = ((1 + k x)^(1-q) - 1) / (k (1 - q)) and the effort x it is taken
of.

C is increasing and concave with C(0) = 0 and slope 1 at 0; q = 1 is its limit log(1 + k x) / k.
Pure functions.
"""

import math

import numpy as np

from ostinato.infra.agent.transcript import Segment, Transcript, TurnRecord
from ostinato.tasks.grading.config import EffortWeights


def length_penalty(effort: float, k: float, q: float) -> float:
    """C_{k,q}(effort). ValueError unless effort >= 0, k > 0 and q >= 0."""
    if effort < 0 or k <= 0 or q < 0:
        raise ValueError(
            f"length penalty of effort {effort} with k {k}, q {q}: "
            "wanted effort >= 0, k > 0, q >= 0"
        )
    if k * effort < 1e-290:
        return effort  # the slope at 0 is 1; below, subnormal products lose their digits
    growth = math.log1p(k * effort)
    exponent = (1.0 - q) * growth
    if q > 1.0:
        # Near its bound 1 / (k (q - 1)) a product of rounded factors would fall by an ulp as the
        # effort grows; this form does not.
        return -math.expm1(exponent) / (k * (q - 1.0))
    # expm1(e)/e -> 1 as e -> 0, so near q = 1 nothing cancels.
    return growth / k * (math.expm1(exponent) / exponent if exponent else 1.0)


def measure_effort(transcript: Transcript) -> dict[str, float]:
    """The six kinds of effort of one attempt, by the names of EffortWeights."""
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
    """x: the weighted sum, in the order of EffortWeights whatever the order of `effort`."""
    return sum(effort[name] * weight for name, weight in weights.model_dump().items())


def _thinking_share(turn: TurnRecord) -> float:
    """Share of a turn's text before its first call.

    Tokens are split in proportion to characters.
    """
    start = turn.text.find(f"<{turn.calls[0].tool}>")
    return start / len(turn.text) if start > 0 else 0.0


def _read_tokens(segment: Segment) -> int:
    """Tokens after the first sampled one that the model did not sample."""
    sampled = np.flatnonzero(segment.loss_mask_T)
    if len(sampled) == 0:
        return 0
    return int(len(segment.loss_mask_T) - sampled[0] - len(sampled))
