"""Collect: the window is complete, each interaction taken or skipped with a reason, twice the
same.
"""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.gateway.config import SIMULATED_TENANT, TenantConfig
from ostinato.tasks.realtime.config import FeedbackConfig
from ostinato.tasks.realtime.feedback.baseline import Baselines
from ostinato.tasks.realtime.feedback.collect import choose_watermark, collect
from ostinato.tasks.realtime.feedback.distil import distil
from ostinato.tasks.realtime.feedback.interactions import Source, Window
from tests.fakes.toy_gateway import LINE, REQUEST, Toy

pytestmark = pytest.mark.asyncio


def window(first: int, last: int, **changes: Any) -> Window:
    said = {"feedback_after": 1_500.0, "feedback_until": 1e12, "served": "nano@1"}
    return Window(line=LINE, from_watermark=first, to_watermark=last, **(said | changes))


async def interact(toy: Toy, *signals: str, key: str = "key-of-team") -> str:
    async with toy.client(key) as client:
        answer = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        for signal in signals:
            body = {"interaction_id": answer["interaction_id"], "signal": signal}
            assert (await client.post("/v1/feedback", json=body)).status_code == 200
    return answer["interaction_id"]


async def test_from_http_to_samples(toy: Toy) -> None:
    kept, reverted = await interact(toy, "edit_kept"), await interact(toy, "edit_reverted")
    found = collect(toy.ledger, toy.objects, window(0, toy.ledger.interactions.latest_watermark()))
    distilled = distil(found.interactions, Baselines(), FeedbackConfig())
    assert [sample.trajectory_id for sample in distilled.samples] == [kept, reverted]
    good, bad = distilled.samples
    assert good.reward == 0.75
    assert bad.reward == -0.75
    assert good.advantage > 0 > bad.advantage
    assert good.segment.oldest_version == 4


async def test_window_is_half_open_and_repeatable(toy: Toy) -> None:
    names = [await interact(toy) for _ in range(4)]
    first = collect(toy.ledger, toy.objects, window(0, 2))
    rest = collect(toy.ledger, toy.objects, window(2, 4))
    taken = [done.interaction_id for done in (*first.interactions, *rest.interactions)]
    assert taken == names
    again = collect(toy.ledger, toy.objects, window(0, 2))
    assert [done.interaction_id for done in again.interactions] == names[:2]


async def test_young_interactions_wait_for_their_feedback(toy: Toy) -> None:
    await interact(toy)
    toy.now[0] += 100
    await interact(toy)
    assert choose_watermark(toy.ledger, LINE, 0, settle_seconds=50, now=toy.now[0]) == 1
    assert choose_watermark(toy.ledger, LINE, 0, settle_seconds=0, now=toy.now[0]) == 2
    assert choose_watermark(toy.ledger, LINE, 2, settle_seconds=0, now=toy.now[0]) == 2


async def test_nothing_vanishes_without_a_reason(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy()
    await interact(toy, "edit_kept")
    lost = await interact(toy)
    toy.model.failure = EngineError("replica 0 is gone")
    failed = await interact(toy)
    (key,) = toy.objects.list(f"interactions/{lost}/")
    toy.objects.delete(key)
    found = collect(toy.ledger, toy.objects, window(0, 3))
    assert len(found.interactions) == 1
    assert {skip.interaction_id: skip.reason.value for skip in found.skipped} == {
        lost: "transcript_lost",
        failed: "infrastructure",
    }


async def test_refusals_are_collected_as_negatives(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(lambda conversation: "I would rather not.")
    await interact(toy)
    found = collect(toy.ledger, toy.objects, window(0, 1))
    distilled = distil(found.interactions, Baselines(), FeedbackConfig())
    assert distilled.rewards[0].terms == {"no_feedback": 0.0, "no_edit": -0.5}
    assert distilled.samples[0].advantage < 0


async def test_greedy_and_truncated_answers_are_not_trained(toy: Toy) -> None:
    sampled = [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.9},
    ]
    async with toy.client() as client:
        for fields in sampled:
            body = {
                "model": "ostinato",
                "messages": [{"role": "user", "content": "Hello"}],
                **fields,
            }
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
    found = collect(toy.ledger, toy.objects, window(0, 4))
    kept = [done.transcript.segments[0].sampling.temperature for done in found.interactions]
    assert kept == [1.0, 0.5]
    assert [skip.reason.value for skip in found.skipped] == ["truncated_sampling"] * 2


async def test_what_another_checkpoint_did_is_not_trained_on_policy(toy: Toy) -> None:
    await interact(toy, "edit_kept")
    assert toy.ledger.interactions.since(0)[0].checkpoint_id == "nano@1"
    found = collect(toy.ledger, toy.objects, window(0, 1, served="nano@2"))
    assert found.interactions == ()
    (skip,) = found.skipped
    assert (skip.reason.value, skip.detail) == ("other_checkpoint", "made by nano@1")


async def test_feedback_after_the_window_reaches_the_next_cycle_of_the_same_checkpoint(
    toy: Toy,
) -> None:
    late, silent = await interact(toy), await interact(toy)
    toy.now[0] = 2_000.0  # the cycle over both opened at 1,500, its candidate was refused
    async with toy.client() as client:
        body = {"interaction_id": late, "signal": "edit_reverted"}
        assert (await client.post("/v1/feedback", json=body)).status_code == 200
    new = await interact(toy)
    found = collect(toy.ledger, toy.objects, window(2, 3))
    assert [taken.interaction_id for taken in found.interactions] == [late, new]
    assert "edit_reverted" in {event.signal for event in found.interactions[0].feedback}
    assert silent not in {taken.interaction_id for taken in found.interactions}
    # said after the cycle opened: the next one's
    assert (
        collect(toy.ledger, toy.objects, window(2, 3, feedback_until=1_900.0))
        .interactions[0]
        .interaction_id
        == new
    )
    # the policy has moved since
    assert not collect(toy.ledger, toy.objects, window(2, 3, served="nano@2")).interactions


async def test_people_and_simulated_users_are_never_in_one_batch(
    make_toy: Callable[..., Toy],
) -> None:
    names = ("team", SIMULATED_TENANT)
    toy = make_toy(
        tenants=tuple(
            TenantConfig(name=name, api_keys=(SecretStr(f"key-of-{name}"),), consent=True)
            for name in names
        )
    )
    early = [await interact(toy, key=f"key-of-{name}") for name in names]
    toy.now[0] = 2_000.0  # said after the cycle before opened
    for name, interaction in zip(names, early, strict=True):
        async with toy.client(f"key-of-{name}") as client:
            body = {"interaction_id": interaction, "signal": "edit_kept"}
            assert (await client.post("/v1/feedback", json=body)).status_code == 200
    new = [await interact(toy, "edit_kept", key=f"key-of-{name}") for name in names]
    for index, source in enumerate((Source.PEOPLE, Source.SIMULATED)):
        found = collect(toy.ledger, toy.objects, window(2, 4, source=source))
        taken = [done.interaction_id for done in found.interactions]
        assert taken == [early[index], new[index]]
        [skip] = found.skipped
        other = ("simulated", "people")[index]
        assert (skip.interaction_id, skip.reason.value) == (new[1 - index], "other_source")
        assert skip.detail == f"of {other}, the cycle trains on {source.value} only"


async def chat(toy: Toy, *messages: str, session: str | None = None) -> tuple[str, str]:
    """Id and text of the next answer. `messages`: user's and assistant's in turns."""
    roles = ("user", "assistant")
    body = {
        "model": "ostinato",
        "messages": [
            {"role": roles[place % 2], "content": text} for place, text in enumerate(messages)
        ],
        "temperature": 1.0,
    }
    headers = {} if session is None else {"X-Ostinato-Session": session}
    async with toy.client() as client:
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
    answer = response.json()
    return answer["id"].removeprefix("chatcmpl-"), answer["choices"][0]["message"]["content"]


async def keep_edit(toy: Toy, interaction: str) -> None:
    async with toy.client() as client:
        body = {"interaction_id": interaction, "signal": "edit_kept"}
        assert (await client.post("/v1/feedback", json=body)).status_code == 200


async def test_feedback_on_the_last_answer_of_a_chat_rewards_those_before_it(toy: Toy) -> None:
    first, text = await chat(toy, "Fix it.")
    asked_again, _ = await chat(toy, "Fix it.", text, "The tests fail.")
    last, _ = await chat(toy, "Fix it.", text, "The test of dates fails.")
    other, _ = await chat(toy, "Say hello.")
    await keep_edit(toy, last)
    found = collect(toy.ledger, toy.objects, window(0, 4))
    distilled = distil(found.interactions, Baselines(), FeedbackConfig())
    assert {reward.interaction_id: reward.judged_id for reward in distilled.rewards} == {
        first: last,
        asked_again: asked_again,
        last: last,
        other: other,
    }
    assert [reward.reward for reward in distilled.rewards] == [0.75, 0.0, 0.75, 0.0]


async def test_a_client_that_names_its_session_may_begin_anew_in_it(toy: Toy) -> None:
    planned, _ = await chat(toy, "Plan it.", session="mine")
    done, _ = await chat(toy, "Do what the plan says.", session="mine")
    other, _ = await chat(toy, "Plan it all.", session="yours")
    await keep_edit(toy, done)
    found = collect(toy.ledger, toy.objects, window(0, 3))
    distilled = distil(found.interactions, Baselines(), FeedbackConfig())
    assert [reward.judged_id for reward in distilled.rewards] == [done, done, other]
    sessions = {row.interaction_id: row.session_id for row in toy.ledger.interactions.since(0)}
    assert sessions[planned] == sessions[done] != sessions[other]
    assert "mine" not in sessions[planned]


async def test_late_feedback_reaches_the_answers_of_earlier_windows_that_it_is_about(
    toy: Toy,
) -> None:
    first, text = await chat(toy, "Fix it.")
    judged, _ = await chat(toy, "Fix something else.")
    await keep_edit(toy, judged)
    toy.now[0] = 2_000.0  # the cycle over both opened at 1,500
    last, _ = await chat(toy, "Fix it.", text, "And its test.")
    await keep_edit(toy, last)
    found = collect(toy.ledger, toy.objects, window(2, 3))
    assert [taken.interaction_id for taken in found.interactions] == [first, last]
    # said after the cycle opened: the next one's
    found = collect(toy.ledger, toy.objects, window(2, 3, feedback_until=1_900.0))
    assert [taken.interaction_id for taken in found.interactions] == [last]
