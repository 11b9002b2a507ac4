"""What is kept of an interaction."""

import asyncio
import dataclasses

import pytest

from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.serving.gateway.recorder import (
    Interaction,
    InteractionRecorder,
    new_interaction_id,
)
from tests.fakes.toy_gateway import LINE, Toy


def test_of_two_requests_at_once_with_one_key_row_and_transcript_are_of_one(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = InteractionRecorder(LINE, toy.ledger, toy.objects, lambda: 1.0, lambda *_: None)
    slow = Interaction(
        new_interaction_id(consent=True, tenant="team", idempotency_key="k"),
        *("slow", "team", toy.context.arms.control, "", True, 1.0, "team"),
    )
    quick = dataclasses.replace(slow, session_id="quick")
    put = toy.objects.put_bytes

    def put_after_the_other(key: str, data: bytes) -> str:
        monkeypatch.setattr(toy.objects, "put_bytes", put)
        asyncio.run(recorder.keep(quick, Transcript.of_failure(EndReason.TIMED_OUT, "quick")))
        return put(key, data)

    monkeypatch.setattr(toy.objects, "put_bytes", put_after_the_other)
    asyncio.run(recorder.keep(slow, Transcript.of_failure(EndReason.TIMED_OUT, "slow")))
    (row,) = toy.ledger.interactions.since(0)
    (key,) = toy.objects.list("interactions/")
    kept = Transcript.from_bytes(toy.objects.get_bytes(key))
    assert (row.object_key, row.session_id, kept.detail) == (key, "quick", "quick")
