"""Keys by command: hashed, revocable while the gateway runs, with a rate and a budget each."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.serving.gateway.config import Caller, IssuedKey, RateLimitConfig
from ostinato.infra.serving.gateway.issued_keys import FILE_NAME, IssuedKeys
from ostinato.infra.serving.gateway.tenants import local_tenants
from tests.fakes.toy_gateway import Toy

CHAT = {"model": "ostinato", "messages": [{"role": "user", "content": "Fix first"}]}


def issue(
    toy: Toy,
    tenant: str = "acme",
    *,
    rate_limit: RateLimitConfig | None = None,
    tokens_per_day: int | None = None,
    operator: bool = False,
) -> tuple[IssuedKey, str]:
    assert toy.context.issued_keys is not None
    caller = Caller(
        name=tenant,
        consent=True,
        rate_limit=rate_limit or RateLimitConfig(),
        tokens_per_day=tokens_per_day,
        operator=operator,
    )
    return toy.context.issued_keys.issue(caller, 1_000.0)


@pytest.mark.asyncio
async def test_key_is_let_in_while_the_gateway_runs_and_refused_once_revoked(
    toy: Toy, tmp_path: Path
) -> None:
    other, other_text = issue(toy, "other")
    key, text = issue(toy)
    async with toy.client(text) as client, toy.client(other_text) as stranger:
        assert (await client.get("/v1/models")).status_code == 200
        IssuedKeys(tmp_path).revoke(key.key_id, 2_000.0)  # as another process would
        refused = await client.get("/v1/models")
        assert (await stranger.get("/v1/models")).status_code == 200
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert other.key_id != key.key_id


def test_file_is_private_and_holds_no_key(toy: Toy, tmp_path: Path) -> None:
    key, text = issue(toy)
    path = tmp_path / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert text not in path.read_text()
    assert key.key_id in path.read_text()
    assert text not in repr(key)


def test_keys_issued_at_once_are_all_kept(tmp_path: Path) -> None:
    def issue_some() -> None:
        for _ in range(5):
            IssuedKeys(tmp_path).issue(Caller(name="acme"), 1.0)

    threads = [threading.Thread(target=issue_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({key.key_id for key in IssuedKeys(tmp_path).read()}) == 20


def test_first_starts_at_once_have_the_same_local_keys(tmp_path: Path) -> None:
    starts = threading.Barrier(8)

    def start(number: int) -> str:
        starts.wait()
        tenant = local_tenants(tmp_path, ("people", f"other-{number}"))["people"]
        return tenant.api_keys[0].get_secret_value()

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(start, range(8)))) == 1
    assert len(json.loads((tmp_path / "gateway_keys.json").read_text())) == 9


def test_unknown_key_id_and_damaged_file_are_named(tmp_path: Path) -> None:
    keys = IssuedKeys(tmp_path)
    with pytest.raises(ConfigError, match="key id is 'gone', wanted one of none"):
        keys.revoke("gone", 1.0)
    (tmp_path / FILE_NAME).write_text('[{"name": "a"}]')
    with pytest.raises(ConfigError, match=FILE_NAME):
        keys.read()


@pytest.mark.asyncio
async def test_damaged_file_lets_nobody_in_and_tells_no_path(toy: Toy, tmp_path: Path) -> None:
    _, text = issue(toy)
    async with toy.client(text) as client, toy.client() as configured:
        assert (await client.get("/v1/models")).status_code == 200
        (tmp_path / FILE_NAME).write_text("{")
        answer = await client.get("/v1/models")
        assert (await configured.get("/v1/models")).status_code == 200
    assert answer.status_code == 503
    assert str(tmp_path) not in answer.text


@pytest.mark.asyncio
async def test_two_keys_of_one_tenant_have_a_rate_each_and_share_interactions(toy: Toy) -> None:
    slow = RateLimitConfig(requests_per_minute=1, burst_requests=1)
    _, first = issue(toy, rate_limit=slow)
    _, second = issue(toy)
    async with toy.client(first) as client, toy.client(second) as other:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert (await client.get("/v1/models")).status_code == 429
        body = {"interaction_id": answer.json()["id"], "signal": "thumbs_up"}
        assert (await other.post("/v1/feedback", json=body)).status_code == 200


@pytest.mark.asyncio
async def test_budget_refuses_work_until_the_day_ends_and_nothing_else(toy: Toy) -> None:
    _, text = issue(toy, tokens_per_day=5)
    async with toy.client(text) as client, toy.client() as other:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        used = answer.json()["usage"]["total_tokens"]
        refused = await client.post("/v1/chat/completions", json=CHAT)
        status = (await client.get("/v1/status")).json()
        assert (await other.post("/v1/chat/completions", json=CHAT)).status_code == 200
        toy.now[0] += 86_400.0
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert int(refused.headers["retry-after"]) > 3_600
    assert status["tokens_left_today"] == 0
    assert status["counters"]["tokens"] == used


@pytest.mark.asyncio
async def test_metrics_are_for_operators(toy: Toy) -> None:
    _, text = issue(toy, "watcher", operator=True)
    async with toy.client(text) as watcher, toy.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.get("/nowhere/secret-name")
        refused = await client.get("/metrics")
        page = (await watcher.get("/metrics")).text
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "permission_denied"
    assert 'ostinato_tenant_events_total{event="interactions",tenant="team"} 1.0' in page
    chats = 'ostinato_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0'
    assert chats in page
    assert "ostinato_request_seconds_bucket" in page
    assert "secret-name" not in page
