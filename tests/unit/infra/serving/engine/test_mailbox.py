"""Batched requests and answers, both ends in one process: the actor's calls are made directly."""

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import ActorUnavailableError

from ostinato.infra.platform.errors import EngineError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.mailbox import Mailbox
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.spec import ModelSpec
from tests.fakes.direct_actor import DirectActor
from tests.fakes.tiny_model import TINY, random_weights

pytestmark = pytest.mark.asyncio


def request(index: int, tokens: int = 12) -> GenerateRequest:
    return GenerateRequest(f"r{index}", f"s{index}", (1, 2, index % 32), tokens, (), seed=index)


async def make_pair(tmp_path: Path, spec: ModelSpec = TINY) -> tuple[EngineReplica, Mailbox]:
    replica = EngineReplica("replica", spec, EngineConfig(slots=4))
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    ChainPublisher(objects, "chain").publish(0, random_weights(spec))
    await replica.follow(objects, "chain")
    return replica, Mailbox("replica", DirectActor(replica))  # type: ignore[arg-type]


async def test_every_request_gets_its_own_answer(tmp_path: Path) -> None:
    _, mailbox = await make_pair(tmp_path)
    calls = [mailbox.generate(request(index)) for index in range(10)]
    answers = await asyncio.gather(*calls)
    assert [answer.request_id for answer in answers] == [f"r{index}" for index in range(10)]
    await mailbox.close()


async def test_an_error_reaches_its_caller_alone(tmp_path: Path) -> None:
    _, mailbox = await make_pair(tmp_path)
    wrong = GenerateRequest("wrong", "s", (99,), 5, ())
    good, bad = await asyncio.gather(
        mailbox.generate(request(0)),
        mailbox.generate(wrong),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError)
    assert good.request_id == "r0"  # type: ignore[arg-type]
    await mailbox.close()


async def test_a_cancelled_caller_frees_the_replicas_slot(tmp_path: Path) -> None:
    # answers so long that none ends before the cancellation, however late a busy machine comes to it
    spec = TINY.model_copy(update={"max_sequence_tokens": 4_096})
    replica, mailbox = await make_pair(tmp_path, spec)
    tokens = 4_000
    calls = [asyncio.create_task(mailbox.generate(request(n, tokens))) for n in range(4)]
    while (await replica.statistics())["running_requests"] < 4:
        await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    numbers = await replica.statistics()
    assert numbers["running_requests"] == numbers["waiting_requests"] == 0
    assert numbers["generated_tokens"] < 4 * tokens
    await mailbox.close()


async def test_a_replica_that_does_not_serve_says_so(tmp_path: Path) -> None:
    replica = EngineReplica("replica", TINY, EngineConfig(slots=4))
    mailbox = Mailbox("replica", DirectActor(replica))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="starting: no weights"):
        await mailbox.generate(request(0))
    await mailbox.close()


async def test_what_waits_for_a_client_that_is_gone_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, gone = await make_pair(tmp_path)
    await gone.generate(request(0))
    await gone.close()
    monkeypatch.setattr("ostinato.infra.serving.engine.replica._GONE_SECONDS", 0.0)
    mailbox = Mailbox("replica", DirectActor(replica))  # type: ignore[arg-type]
    assert (await mailbox.generate(request(1))).request_id == "r1"
    assert list(replica._outboxes) == [mailbox._client_id]
    await mailbox.close()


async def test_a_request_that_was_not_delivered_fails_and_the_next_one_is_answered(
    tmp_path: Path,
) -> None:
    replica, _ = await make_pair(tmp_path)
    mailbox = Mailbox("replica", DirectActor(replica, lost=("post",)))  # type: ignore[arg-type]
    with pytest.raises(ActorUnavailableError):
        await mailbox.generate(request(0))
    assert (await mailbox.generate(request(1))).request_id == "r1"
    await mailbox.close()
