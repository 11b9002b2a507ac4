"""Feedback on one answer counts for those that led to it, and for no other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from ostinato.infra.agent.transcript import CallStatus
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import FeedbackConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.distil import distil
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction
from ostinato.tasks.realtime.feedback.sessions import find_judged
from tests.unit.tasks.realtime.feedback.interactions import interaction, segment, transcript


class Answer(NamedTuple):
    """One answer of a session: the tokens of its request, those of the answer, and its feedback."""

    context: Sequence[int]
    answer: Sequence[int]
    signals: Sequence[tuple[Signal, float]] = ()


KEPT = [(Signal.EDIT_KEPT, 1.0)]
DOWN = [(Signal.THUMBS_DOWN, 1.0)]


def session_of(*answers: Answer, session: str = "s") -> list[CollectedInteraction]:
    return [
        interaction(
            *answer.signals,
            name=f"{session}{place}",
            said=transcript(
                CallStatus.OK,
                segments=(segment(context=answer.context, answer=answer.answer),),
            ),
            session=session,
            sequence=place,
        )
        for place, answer in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("answers", "judged"),
    [
        pytest.param(
            [Answer([1], [2]), Answer([1, 2, 3], [4]), Answer([1, 2, 3, 4, 5], [6], KEPT)],
            [2, 2, 2],
            id="a chain of calls",
        ),
        pytest.param(
            [Answer([1], [2], DOWN), Answer([1, 2, 3], [4]), Answer([1, 2, 3, 4, 5], [6], KEPT)],
            [0, 2, 2],
            id="own feedback counts",
        ),
        pytest.param(
            [Answer([1], [2], KEPT), Answer([1, 2, 3], [4])], [0, 1], id="never a later answer"
        ),
        pytest.param(
            [Answer([1], [2]), Answer([1, 2, 3], [4]), Answer([1, 2, 5], [6], KEPT)],
            [2, 1, 2],
            id="another user message after the same answer",
        ),
        pytest.param(
            [Answer([1], [2]), Answer([1], [4], KEPT)], [0, 1], id="the same prompt again"
        ),
        pytest.param(
            [Answer([1], [2]), Answer([1, 2, 3], [4], DOWN), Answer([1, 2, 5], [6], KEPT)],
            [2, 1, 2],
            id="an answer that was asked again judges no other",
        ),
        pytest.param(
            [
                Answer([1], [2]),
                Answer([1, 2, 3], [4]),
                Answer([7], [8]),
                Answer([7, 8, 1], [2], KEPT),
            ],
            [3, 3, 3, 3],
            id="compaction and sub-agents begin anew",
        ),
        pytest.param(
            [Answer([1], [2]), Answer([1, 2, 3], [4], [(Signal.LATENCY_SECONDS, 2.0)])],
            [0, 1],
            id="the gateway's measurement is no feedback",
        ),
        pytest.param(
            [Answer([1], [2]), Answer([1, 2, 3], [4], [*KEPT, (Signal.EDIT_KEPT, 0.0)])],
            [0, 1],
            id="withdrawn feedback is none",
        ),
    ],
)
def test_feedback_counts_for_the_answers_that_led_to_it(
    answers: list[Answer], judged: list[int]
) -> None:
    assert find_judged(session_of(*answers)) == judged


def test_sessions_are_told_apart_and_order_in_the_batch_does_not_matter() -> None:
    chain = [Answer([1], [2]), Answer([1, 2, 3], [4], KEPT)]
    silent = [Answer([1], [2]), Answer([1, 2, 3], [4])]
    batch = [*session_of(*chain, session="a"), *session_of(*silent, session="b")]
    batch = batch[::-1]
    names = [batch[place].interaction_id for place in find_judged(batch)]
    assert names == ["b1", "b0", "a1", "a1"]


def test_a_long_session_is_one_observation() -> None:
    chain = [Answer([1], [2]), Answer([1, 2, 3], [4]), Answer([1, 2, 3, 4, 5], [6], KEPT)]
    alone = interaction(*DOWN, name="other")
    short = distil([*session_of(chain[2]), alone], Baselines(), FeedbackConfig())
    whole = distil([*session_of(*chain), alone], Baselines(), FeedbackConfig())
    assert [reward.judged_id for reward in whole.rewards] == ["s2", "s2", "s2", "other"]
    assert [sample.advantage for sample in whole.samples] == pytest.approx(
        [short.samples[0].advantage] * 3 + [short.samples[1].advantage]
    )
    assert whole.baselines == short.baselines
    trained = [np.flatnonzero(sample.segment.loss_mask_T).tolist() for sample in whole.samples]
    assert trained[:3] == [[1], [3], [5]]  # each sampled token once
