"""Learned threshold: with +0.75 for accept, -0.25 for reject and 0 for nothing shown, the best
policy shows a suggestion exactly when P(accept) > 25 %. The whole path (signals -> distil ->
baseline -> REINFORCE) must find that number.
"""

import numpy as np

from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import (
    BaselineConfig,
    DistilConfig,
    FeedbackConfig,
    SignalWeights,
)
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import distil
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction
from tests.unit.tasks.realtime.feedback.interactions import interaction, segment, transcript

SHOW, HIDE = 11, 12
CONFIG = FeedbackConfig(
    distil=DistilConfig(
        weights=SignalWeights(edit_kept=0.75, edit_reverted=-0.25, no_feedback=0.0),
        kinds_without_edits=frozenset({"suggestion"}),
    ),
    baseline=BaselineConfig(decay=0.8),
)


def show_probability(weights: np.ndarray, accept_B: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-(weights[0] * (accept_B - 0.5) + weights[1])))


def suggestion(index: int, *, shown: bool, accepted: bool) -> CollectedInteraction:
    said = transcript(CallStatus.OK, segments=(segment(answer=[SHOW if shown else HIDE]),))
    events = [(Signal.EDIT_KEPT if accepted else Signal.EDIT_REVERTED, 1.0)] if shown else []
    return interaction(*events, name=f"s{index}", said=said, kind="suggestion")


def test_policy_learns_to_show_exactly_what_is_accepted_more_than_one_time_in_four() -> None:
    rng = np.random.default_rng(0)
    weights, late_weights, baselines = np.zeros(2), [], Baselines()
    for update in range(80):
        accept_B = rng.uniform(0, 1, 120)
        shown_B = rng.random(120) < show_probability(weights, accept_B)
        batch = [
            suggestion(index, shown=bool(shown), accepted=bool(rng.random() < accept))
            for index, (accept, shown) in enumerate(zip(accept_B, shown_B, strict=True))
        ]
        distilled = distil(batch, baselines, CONFIG)
        baselines = distilled.baselines
        advantage_B = np.array([sample.advantage for sample in distilled.samples])
        acted_B = np.array([sample.segment.token_ids_T[-1] == SHOW for sample in distilled.samples])
        surprise_B = acted_B - show_probability(weights, accept_B)
        step = (30 if update < 40 else 15) / len(accept_B)
        weights = weights + step * np.array(
            [
                4 * (advantage_B * surprise_B * (accept_B - 0.5)).sum(),
                (advantage_B * surprise_B).sum(),
            ]
        )
        if update >= 40:
            late_weights.append(weights)
    slope, offset = np.mean(late_weights, axis=0)
    assert slope > 0
    # the spread of the estimate over seeds is 0.02
    assert abs(0.5 - offset / slope - 0.25) < 0.06
