"""From a checkpoint directory to answers: real engine, real sandbox, real HTTP; arms change while
it serves.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.engine.local import LocalEngine
from ostinato.infra.serving.gateway.config import GatewayConfig
from ostinato.infra.serving.gateway.server import running_server
from ostinato.infra.serving.gateway.serving import (
    OpenGateway,
    ServedCheckpoint,
    ServingPlan,
    follow_plan,
    open_gateway,
)
from ostinato.infra.serving.gateway.tenants import local_tenants
from ostinato.models.checkpoint import save_checkpoint
from ostinato.models.decode.engine import EngineConfig
from ostinato.models.rendering import Renderer
from tests.fakes.tiny_model import TINY, random_weights
from tests.fakes.toy_gateway import BROKEN, toy_repository, toy_uploads

pytestmark = pytest.mark.asyncio

SESSION = {
    "repository": "toy",
    "message": "Fix first",
    "files": {"pkg/first.py": BROKEN},
    "seed": 3,
}
HARNESS = HarnessConfig(context_tokens=128, max_generated_tokens=24, max_turns=2)


def checkpoint(directory: Path, renderer: Renderer, version: int) -> ServedCheckpoint:
    spec = TINY.model_copy(update={"vocab_size": renderer.vocab_size, "max_sequence_tokens": 160})
    tokenizer = renderer.save(directory / "tokenizer")
    place = directory / f"checkpoint-{version}"
    save_checkpoint(place, spec, random_weights(spec, seed=version), tokenizer_path=tokenizer)
    return ServedCheckpoint(f"nano@{version}", place, version)


@asynccontextmanager
async def served(
    directory: Path,
    plan: ServingPlan,
    harness: HarnessConfig = HARNESS,
    tokens_per_day: int | None = None,
) -> AsyncIterator[tuple[OpenGateway, httpx2.AsyncClient]]:
    tenant = local_tenants(directory, ("people",))["people"]
    tenant = tenant.model_copy(update={"tokens_per_day": tokens_per_day})
    ledger = Ledger(f"sqlite:///{directory}/ledger.db").migrate()
    async with open_gateway(
        plan,
        [toy_repository(directory)],
        GatewayConfig(line="people", tenants=(tenant,), harness=harness),
        ledger=ledger,
        objects=ObjectStore.from_url(f"file://{directory}/objects"),
        engine=EngineConfig(slots=4),
        uploads=toy_uploads(directory),
        boxes_per_repository=2,
    ) as gateway:
        headers = {"Authorization": f"Bearer {tenant.api_keys[0].get_secret_value()}"}
        transport = httpx2.ASGITransport(app=gateway.app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://g", headers=headers, timeout=60
        ) as client:
            yield gateway, client


@pytest.fixture
def plan(tmp_path: Path, renderer: Renderer) -> ServingPlan:
    """One checkpoint, of version 5."""
    return ServingPlan(checkpoint(tmp_path, renderer, version=5))


def read_stream(text: str) -> tuple[list[str], dict[str, int]]:
    """The pieces of a streamed answer, and the usage at its end."""
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    return [piece for piece in pieces if piece], events[-1]["usage"]


async def test_the_engine_has_answered_before_the_gateway_is_open(
    tmp_path: Path, plan: ServingPlan
) -> None:
    """What it loads and compiles with its first answer, no user waits for."""
    async with served(tmp_path, plan) as (gateway, _):
        engine = gateway.context.arms.control.model
        assert isinstance(engine, LocalEngine)
        assert engine.statistics()["generated_tokens"] == 2


async def test_a_budget_outlives_the_gateway(tmp_path: Path, plan: ServingPlan) -> None:
    chat = {"model": "ostinato", "messages": [{"role": "user", "content": "Fix"}], "max_tokens": 4}
    async with served(tmp_path, plan, tokens_per_day=10_000) as (_, client):
        usage = (await client.post("/v1/chat/completions", json=chat)).json()["usage"]
    async with served(tmp_path, plan, tokens_per_day=10_000) as (_, client):
        left = (await client.get("/v1/status")).json()["tokens_left_today"]
    assert left == 10_000 - usage["total_tokens"] < 10_000


async def test_real_engine_and_sandbox_answer_and_leave_whole_records(
    tmp_path: Path, plan: ServingPlan
) -> None:
    async with served(tmp_path, plan) as (gateway, client):
        answers = await asyncio.gather(
            *(client.post("/v1/agent/sessions", json=SESSION) for _ in range(3))
        )
    replies = [answer.json() for answer in answers]
    assert {reply["status"] for reply in replies} <= {
        "finished",
        "token_limit",
        "turn_limit",
        "broken_calls",
    }
    # the same seed on the same weights: the three ran together and sampled the same tokens
    rows = gateway.context.ledger.interactions.since(0)
    stored = [
        Transcript.from_bytes(gateway.context.objects.get_bytes(row.object_key)) for row in rows
    ]
    segment = stored[0].segments[0]
    assert all((other.segments[0].token_ids_T == segment.token_ids_T).all() for other in stored)
    assert segment.sampled_tokens > 0
    assert set(segment.weight_versions_T[segment.loss_mask_T]) == {5}
    assert (segment.routed_experts_TLK[:-1] >= 0).all()  # the last token was never fed back


CHAT = {
    "model": "ostinato",
    "messages": [{"role": "user", "content": "Fix first"}],
    "seed": 7,
    "stream_options": {"include_usage": True},
}


async def test_a_real_engine_streams_token_by_token_what_it_answers_whole(
    tmp_path: Path, plan: ServingPlan
) -> None:
    chat = CHAT | {"max_tokens": 40}
    async with served(tmp_path, plan) as (gateway, client):
        whole = (await client.post("/v1/chat/completions", json=chat)).json()
        text = (await client.post("/v1/chat/completions", json=chat | {"stream": True})).text
    said, usage = read_stream(text)
    assert "".join(said) == whole["choices"][0]["message"]["content"]
    assert len(said) > 10  # random weights seldom say END
    assert usage == whole["usage"]
    first, second = (
        Transcript.from_bytes(gateway.context.objects.get_bytes(row.object_key)).segments[0]
        for row in gateway.context.ledger.interactions.since(0)
    )
    assert (first.token_ids_T == second.token_ids_T).all()


async def test_a_real_engine_stops_at_a_stop_string_inside_its_tokens(
    tmp_path: Path, plan: ServingPlan
) -> None:
    chat = CHAT | {"max_tokens": 60}
    async with served(tmp_path, plan) as (gateway, client):
        whole = (await client.post("/v1/chat/completions", json=chat)).json()
        said = whole["choices"][0]["message"]["content"]
        stop = said[len(said) // 2 : len(said) // 2 + 3]
        async with (
            running_server(gateway.app, "127.0.0.1", 0) as url,
            httpx2.AsyncClient(base_url=url, headers=client.headers, timeout=60) as over_a_socket,
        ):
            cut = chat | {"stop": [stop, "never said"]}
            answer = (await over_a_socket.post("/v1/chat/completions", json=cut)).json()
            text = (
                await over_a_socket.post("/v1/chat/completions", json=cut | {"stream": True})
            ).text
        rows = gateway.context.ledger.interactions.since(0)
        segments = [
            Transcript.from_bytes(gateway.context.objects.get_bytes(row.object_key)).segments[0]
            for row in rows
        ]
    pieces, usage = read_stream(text)
    assert answer["choices"][0]["message"]["content"] == said[: said.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "".join(pieces) == said[: said.index(stop)]
    assert usage == answer["usage"]
    assert answer["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    longest, first, second = segments
    kept = len(first.token_ids_T)
    assert (longest.token_ids_T[:kept] == first.token_ids_T).all()
    assert (first.token_ids_T == second.token_ids_T).all()
    assert (first.routed_experts_TLK[:-1] >= 0).all()


async def test_canary_and_promotion_reach_a_running_gateway(
    tmp_path: Path, renderer: Renderer
) -> None:
    old, new = (checkpoint(tmp_path, renderer, version) for version in (1, 2))
    plans = [ServingPlan(old)]
    async with served(tmp_path, plans[0]) as (gateway, client):
        following = asyncio.create_task(follow_plan(gateway, lambda: plans[-1], poll_seconds=0.01))

        def arms() -> list[tuple[str, str]]:
            return [(arm.name, arm.checkpoint_id) for arm in gateway.context.arms.all]

        assert arms() == [("control", "nano@1")]
        plans.append(ServingPlan(old, new, 0.5))
        while len(arms()) < 2:
            await asyncio.sleep(0.01)
        assert arms() == [("control", "nano@1"), ("candidate", "nano@2")]
        plans.append(ServingPlan(new))
        while arms() != [("control", "nano@2")]:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/agent/sessions", json=SESSION)).status_code == 200
        assert gateway.context.ledger.interactions.since(0)[0].weight_version == 2
        following.cancel()


async def test_a_plan_that_cannot_be_made_is_passed_over(
    tmp_path: Path, renderer: Renderer
) -> None:
    old, new = (checkpoint(tmp_path, renderer, version) for version in (1, 2))
    gone = ServedCheckpoint("nano@9", tmp_path / "nowhere", 9)
    asked: list[int] = []

    def read_plan() -> ServingPlan:
        asked.append(len(asked))
        if len(asked) == 1:
            raise ConfigError("checkpoint mine@1 has no problem set among its ancestors")
        return ServingPlan(gone if len(asked) == 2 else new)

    async with served(tmp_path, ServingPlan(old)) as (gateway, _):
        following = asyncio.create_task(follow_plan(gateway, read_plan, poll_seconds=0.01))
        while [arm.checkpoint_id for arm in gateway.context.arms.all] != ["nano@2"]:
            assert not following.done()
            await asyncio.sleep(0.01)
        following.cancel()


async def test_missing_checkpoint_and_too_long_context_are_named(
    tmp_path: Path, renderer: Renderer
) -> None:
    plan = ServingPlan(checkpoint(tmp_path, renderer, version=1))
    with pytest.raises(ConfigError, match=r"harness.context_tokens is 9000, wanted at most"):
        async with served(tmp_path, plan, HARNESS.model_copy(update={"context_tokens": 9_000})):
            pass
    gone = ServedCheckpoint("nano@9", tmp_path / "nowhere", 9)
    with pytest.raises(StorageError, match=r"nano@9 in .*nowhere"):
        async with served(tmp_path, ServingPlan(gone)):
            pass


async def test_local_keys_stay_the_same_and_are_private(tmp_path: Path) -> None:
    first = local_tenants(tmp_path, ("people",))
    again = local_tenants(tmp_path, ("people", "simulated"))
    assert first["people"].api_keys == again["people"].api_keys
    assert (tmp_path / "gateway_keys.json").stat().st_mode & 0o077 == 0
    (tmp_path / "gateway_keys.json").write_text("{")
    with pytest.raises(ConfigError, match="delete it for new keys"):
        local_tenants(tmp_path, ("people",))
