"""What users do becomes a reward with a reason; nothing bad is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.agent.transcript import CallStatus, EndReason
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.config import DistilConfig, FeedbackConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines, DistilledReward
from ostinato.tasks.realtime.feedback.distil import distil, distil_reward
from ostinato.tasks.realtime.feedback.interactions import CollectedInteraction
from tests.unit.tasks.realtime.feedback.interactions import interaction, segment, transcript

CONFIG = DistilConfig()
EVENTS = st.lists(st.tuples(st.sampled_from(list(Signal)), st.floats(0, 1000)), max_size=12)


def reward_of(alone: CollectedInteraction) -> DistilledReward:
    return distil_reward(alone, alone, CONFIG)


@pytest.mark.parametrize(
    ("events", "reward", "reason"),
    [
        ([(Signal.EDIT_KEPT, 1)], 0.75, "edit_kept"),
        ([(Signal.EDIT_REVERTED, 1)], -0.75, "edit_reverted"),
        ([(Signal.EDIT_KEPT, 1), (Signal.EDIT_REVERTED, 1)], -0.75, "edit_reverted"),
        (
            [(Signal.EDIT_KEPT, 1), (Signal.THUMBS_UP, 1), (Signal.EDIT_SURVIVED, 1.0)],
            1.0,
            "edit_kept",
        ),
        ([(Signal.EDIT_KEPT, 1), (Signal.EDIT_SURVIVED, 0.0)], 0.5, "edit_kept"),
        ([(Signal.DISSATISFIED_FOLLOW_UP, 1)], -0.5, "dissatisfied_follow_up"),
        ([(Signal.ABANDONED, 1), (Signal.THUMBS_DOWN, 1)], -0.75, "abandoned"),
        ([(Signal.EDIT_KEPT, 1), (Signal.LATENCY_SECONDS, 45.0)], 0.65, "edit_kept"),
        ([(Signal.THUMBS_UP, 0)], 0.0, "no_feedback"),
        ([(Signal.EDIT_KEPT, 0)], 0.0, "no_feedback"),
        ([(Signal.EDIT_REVERTED, 0)], 0.0, "no_feedback"),
        ([(Signal.DISSATISFIED_FOLLOW_UP, 0)], 0.0, "no_feedback"),
        ([(Signal.ABANDONED, 0)], 0.0, "no_feedback"),
        ([(Signal.THUMBS_DOWN, 0)], 0.0, "no_feedback"),
        ([(Signal.THUMBS_UP, 1), (Signal.THUMBS_UP, 0)], 0.0, "no_feedback"),
        ([(Signal.EDIT_KEPT, 1), (Signal.EDIT_REVERTED, 0)], 0.75, "edit_kept"),
        ([(Signal.EDIT_KEPT, 0), (Signal.EDIT_REVERTED, 1)], -0.75, "edit_reverted"),
        ([(Signal.EDIT_KEPT, 0.4)], 0.3, "edit_kept"),
        ([(Signal.THUMBS_DOWN, 0.5)], -0.125, "thumbs_down"),
        ([], 0.0, "no_feedback"),
        ([(Signal.LATENCY_SECONDS, 1.0)], 0.0, "no_feedback"),
    ],
)
def test_signals_add_up(events: list[tuple[Signal, float]], reward: float, reason: str) -> None:
    distilled = reward_of(interaction(*events))
    assert distilled.reward == pytest.approx(reward)
    assert distilled.reason == reason


def test_broken_calls_and_refusals_are_negative_even_when_the_user_is_silent() -> None:
    broken = transcript(
        CallStatus.MALFORMED, CallStatus.MALFORMED, end_reason=EndReason.BROKEN_CALLS
    )
    refused = transcript(CallStatus.OK, tool="read_file")
    assert reward_of(interaction(said=broken)).terms.keys() >= {
        "broken_calls",
        "no_edit",
        "unfinished",
    }
    assert reward_of(interaction(said=broken)).reward == -1.0
    assert reward_of(interaction(said=refused)).reward == -0.5


@pytest.mark.parametrize("tool", ["edit_file", "write_file", "delete_file"])
def test_every_tool_that_changes_files_is_an_edit(tool: str) -> None:
    changed = transcript(CallStatus.OK, tool=tool)
    assert "no_edit" not in reward_of(interaction(said=changed)).terms


def test_chat_needs_no_edit() -> None:
    assert reward_of(interaction(said=transcript(), kind="chat")).reward == 0.0


@given(EVENTS)
def test_reward_stays_between_minus_one_and_one(events: list[tuple[Signal, float]]) -> None:
    distilled = reward_of(interaction(*events))
    assert -1 <= distilled.reward <= 1
    assert distilled.reason in distilled.terms


@given(EVENTS)
def test_saying_the_same_twice_changes_nothing(events: list[tuple[Signal, float]]) -> None:
    once = reward_of(interaction(*events))
    assert reward_of(interaction(*events, *events[-1:])).reward == once.reward


def test_every_interaction_with_sampled_tokens_becomes_a_sample() -> None:
    chain = transcript(CallStatus.OK, segments=(segment(2), segment(3)))
    batch = [interaction((Signal.EDIT_KEPT, 1), name="a", said=chain), interaction(name="b")]
    distilled = distil(batch, Baselines(), FeedbackConfig())
    assert [sample.sample_id for sample in distilled.samples] == ["a/0", "a/1", "b/0"]
    first, second, third = distilled.samples
    assert first.advantage == second.advantage > 0 > third.advantage


def test_distilling_again_gives_the_same_batch() -> None:
    batch = [
        interaction((Signal.EDIT_KEPT, 1), name="a"),
        interaction((Signal.ABANDONED, 1), name="b"),
    ]
    first, again = (distil(batch, Baselines(), FeedbackConfig()) for _ in range(2))
    assert first.rewards == again.rewards
    assert first.baselines == again.baselines
