"""Agent sessions over HTTP: the patch comes back, the tokens are kept, sessions go on where they
were.
"""

import asyncio
from collections.abc import Callable

import pytest

from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform.errors import CapacityExhausted, EngineError
from ostinato.infra.serving.gateway.config import MAX_TENANT_SESSIONS
from tests.fakes.toy_gateway import PRISTINE, REQUEST, Toy

pytestmark = pytest.mark.asyncio


async def test_agent_repairs_the_users_file_and_returns_the_patch(toy: Toy) -> None:
    async with toy.client() as client:
        answer = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
    assert answer["status"] == "finished"
    assert answer["final_message"] == "Fixed."
    assert answer["changed_files"] == {"pkg/first.py": PRISTINE["pkg/first.py"].decode()}
    assert "-    return items[1]\n+    return items[0]\n" in answer["diff"]
    assert (answer["turns"], answer["tool_calls"]) == (3, 3)


async def test_interaction_is_recorded_with_tokens_arm_and_weight_version(toy: Toy) -> None:
    async with toy.client() as client:
        answer = (
            await client.post("/v1/agent/sessions", json=REQUEST | {"problem_kind": "mutation"})
        ).json()
    (row,) = toy.ledger.interactions.since(0)
    assert (row.interaction_id, row.session_id) == (answer["interaction_id"], answer["session_id"])
    assert (row.tenant, row.arm, row.weight_version, row.problem_kind) == (
        "team",
        "control",
        4,
        "mutation",
    )
    transcript = Transcript.from_bytes(toy.objects.get_bytes(row.object_key))
    tokens = sum(segment.sampled_tokens for segment in transcript.segments)
    measured = {said.signal: said.value for said in row.feedback}
    assert measured == {"latency_seconds": 0.0, "generated_tokens": tokens}
    sampled = transcript.segments[0].loss_mask_T.sum()
    assert sampled == answer["usage"]["completion_tokens"] > 0


async def test_follow_up_continues_tokens_and_files(toy: Toy) -> None:
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        url = f"/v1/agent/sessions/{first['session_id']}/messages"
        second = (await client.post(url, json={"message": "It still fails"})).json()
    assert second["session_id"] == first["session_id"]
    assert second["changed_files"] == first["changed_files"]
    before, after = (
        Transcript.from_bytes(toy.objects.get_bytes(row.object_key)).segments[0]
        for row in toy.ledger.interactions.since(0)
    )
    length = len(before.token_ids_T)
    assert (after.token_ids_T[:length] == before.token_ids_T).all()
    assert not after.loss_mask_T[:length].any()  # trained under the first interaction, context here
    assert after.sampled_tokens > 0


async def test_follow_up_without_room_begins_a_new_conversation(make_toy) -> None:
    toy = make_toy(follow_up_context_tokens=650)
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        url = f"/v1/agent/sessions/{first['session_id']}/messages"
        await client.post(url, json={"message": "It still fails"})
    prompt = toy.context.renderer.decode(toy.model.requests[-3].token_ids)
    assert prompt.startswith("<|user|>Fix first in pkg/first.py\n\nIt still fails<|end|>")


async def test_same_seed_gives_the_same_sampling_seed(toy: Toy) -> None:
    async with toy.client() as client:
        for _ in range(2):
            await client.post("/v1/agent/sessions", json=REQUEST | {"seed": 5})
    seeds = [request.seed for request in toy.model.requests]
    assert seeds[:3] == seeds[3:] == [5, 6, 7]


async def test_engine_failure_is_an_answer_without_what_the_server_says_of_it(toy: Toy) -> None:
    toy.model.failure = EngineError("no checkpoint in /home/operator")
    async with toy.client() as client:
        answer = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
    assert answer["status"] == "engine_failed"
    assert answer["detail"] == "the engine failed"


async def test_follow_up_to_an_attempt_without_an_answer_takes_the_headers_place(toy: Toy) -> None:
    toy.model.failure = EngineError("replica 0 is gone")
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        toy.model.failure = None
        url = f"/v1/agent/sessions/{first['session_id']}/messages"
        num_requests = len(toy.model.requests)
        await client.post(url, json={"message": "It still fails"})
    prompt = toy.context.renderer.decode(toy.model.requests[num_requests].token_ids)
    assert prompt == (
        "<|user|>Fix first in pkg/first.py<|end|><|user|>It still fails<|end|><|assistant|>"
    )


async def test_tests_of_the_session_reach_the_sandbox(toy: Toy) -> None:
    async with toy.client() as client:
        await client.post(
            "/v1/agent/sessions", json=REQUEST | {"test_ids": ["tests/test_first.py::test_first"]}
        )
    assert toy.workplaces.leases == [("tests/test_first.py::test_first",)]


async def test_strangers_do_not_see_a_session(toy: Toy) -> None:
    async with toy.client() as client, toy.client("key-of-private") as stranger:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        url = f"/v1/agent/sessions/{first['session_id']}"
        assert (await stranger.post(f"{url}/messages", json={"message": "hi"})).status_code == 404
        assert (await stranger.delete(url)).status_code == 404
        assert (await client.delete(url)).status_code == 204
        assert (await client.post(f"{url}/messages", json={"message": "hi"})).status_code == 404


async def test_idle_sessions_are_forgotten(toy: Toy) -> None:
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        toy.now[0] += 4_000
        answer = await client.post(
            f"/v1/agent/sessions/{first['session_id']}/messages", json={"message": "hi"}
        )
    assert answer.status_code == 404
    assert "open a new one" in answer.json()["error"]["message"]


async def test_bad_requests_name_field_value_and_what_is_wanted(toy: Toy) -> None:
    async with toy.client() as client:
        for change, field, words in [
            ({"repository": "nowhere"}, "repository", "'nowhere', wanted one of toy"),
            ({"files": {"../etc/passwd": ""}}, "files", "'../etc/passwd', wanted one inside"),
            ({"files": {"a": "x" * (2 << 20)}}, "files", "wanted at most 1048576"),
            ({"message": ""}, "message", "message is ''"),
            ({"colour": 1}, "colour", "Extra inputs"),
            ({"message": "x" * 30_000}, "message", "wanted at most 20000"),
        ]:
            error = (await client.post("/v1/agent/sessions", json=REQUEST | change)).json()["error"]
            assert error["param"] == field
            assert words in error["message"]
    assert toy.ledger.interactions.since(0) == []


async def test_a_refused_follow_up_changes_no_file(toy: Toy) -> None:
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        url = f"/v1/agent/sessions/{first['session_id']}/messages"
        body = {"message": "x" * 30_000, "files": {"pkg/new.py": "a = 1\n"}}
        assert (await client.post(url, json=body)).status_code == 400
        later = (await client.post(url, json={"message": "It still fails"})).json()
    assert later["changed_files"] == first["changed_files"]


@pytest.mark.parametrize("place", ["header", "body"])
async def test_consent_withdrawn_in_a_follow_up_holds_for_the_rest(toy: Toy, place: str) -> None:
    async with toy.client() as client:
        first = (await client.post("/v1/agent/sessions", json=REQUEST)).json()
        url = f"/v1/agent/sessions/{first['session_id']}/messages"
        headers = {"X-Ostinato-Store": "false"} if place == "header" else {}
        body = {"message": "My secret"} | ({"store": False} if place == "body" else {})
        private = (await client.post(url, json=body, headers=headers)).json()
        later = (await client.post(url, json={"message": "It still fails"})).json()
    (row,) = toy.ledger.interactions.since(0)
    assert row.interaction_id == first["interaction_id"]
    assert private["interaction_id"].startswith("private-")
    assert later["interaction_id"].startswith("private-")


async def test_a_repeated_request_with_its_key_is_answered_once(toy: Toy) -> None:
    headers = {"Idempotency-Key": "k"}
    async with toy.client() as client:
        opened = [
            (await client.post("/v1/agent/sessions", json=REQUEST, headers=headers)).json()
            for _ in range(2)
        ]
        num_requests = len(toy.model.requests)
        url = f"/v1/agent/sessions/{opened[0]['session_id']}/messages"
        body = {"message": "It still fails"}
        followed = [(await client.post(url, json=body, headers=headers)).json() for _ in range(2)]
    assert opened[0] == opened[1]
    assert followed[0] == followed[1]
    assert len(toy.model.requests) == 2 * num_requests
    assert len(toy.ledger.interactions.since(0)) == 2


async def test_a_key_used_for_another_request_is_another_interaction(toy: Toy) -> None:
    headers = {"Idempotency-Key": "k"}
    async with toy.client() as client:
        answers = [
            (await client.post("/v1/agent/sessions", json=REQUEST | change, headers=headers)).json()
            for change in ({}, {"message": "Do something else"})
        ]
    rows = toy.ledger.interactions.since(0)
    assert [row.interaction_id for row in rows] == [each["interaction_id"] for each in answers]
    assert len({row.session_id for row in rows}) == 2


async def test_a_tenant_ends_only_its_own_sessions(toy: Toy) -> None:
    async with toy.client() as client, toy.client("key-of-private") as crowd:
        mine = (await client.post("/v1/agent/sessions", json=REQUEST)).json()["session_id"]
        first = (await crowd.post("/v1/agent/sessions", json=REQUEST)).json()["session_id"]
        for _ in range(MAX_TENANT_SESSIONS):
            assert (await crowd.post("/v1/agent/sessions", json=REQUEST)).status_code == 200
        again = {"message": "It still fails"}
        kept = await client.post(f"/v1/agent/sessions/{mine}/messages", json=again)
        lost = await crowd.post(f"/v1/agent/sessions/{first}/messages", json=again)
        status = (await crowd.get("/v1/status")).json()
    assert (kept.status_code, lost.status_code) == (200, 404)
    assert status["open_sessions"] == MAX_TENANT_SESSIONS


async def test_agents_of_one_tenant_at_once_are_limited(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(agents_at_once=2)
    gate = asyncio.Event()
    toy.model.wait = gate.wait
    async with toy.client() as client, toy.client("key-of-private") as stranger:
        mine = [
            asyncio.create_task(client.post("/v1/agent/sessions", json=REQUEST)) for _ in range(2)
        ]
        while len(toy.workplaces.leases) < 2:
            await asyncio.sleep(0)
        refused = await client.post("/v1/agent/sessions", json=REQUEST)
        other = asyncio.create_task(stranger.post("/v1/agent/sessions", json=REQUEST))
        while len(toy.workplaces.leases) < 3:
            await asyncio.sleep(0)
        gate.set()
        answers = [await task for task in (*mine, other)]
        url = f"/v1/agent/sessions/{answers[0].json()['session_id']}/messages"
        later = await client.post(url, json={"message": "It still fails"})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_agents"
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in (*answers, later)] == [200] * 4


async def test_agent_that_failed_counts_no_more(make_toy: Callable[..., Toy]) -> None:
    toy = make_toy(agents_at_once=1)
    async with toy.client() as client:
        for failure, status in ((CapacityExhausted("none"), 503), (None, 200)):
            toy.workplaces.failure = failure
            answer = await client.post("/v1/agent/sessions", json=REQUEST)
            assert answer.status_code == status


@pytest.mark.parametrize("key", ["key-of-team", "key-of-private"], ids=["consent", "none"])
async def test_simultaneous_requests_with_one_key_are_answered_by_one_attempt(
    toy: Toy, key: str
) -> None:
    headers = {"Idempotency-Key": "k"}

    async def send_twice(url: str, body: dict) -> list[dict]:
        gate = asyncio.Event()
        toy.model.wait = gate.wait
        num_leases = len(toy.workplaces.leases)
        sent = [asyncio.create_task(client.post(url, json=body, headers=headers)) for _ in range(2)]
        while len(toy.workplaces.leases) == num_leases:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        gate.set()
        answers = [await task for task in sent]
        assert [answer.status_code for answer in answers] == [200, 200]
        return [answer.json() for answer in answers]

    async with toy.client(key) as client:
        opened = await send_twice("/v1/agent/sessions", REQUEST)
        url = f"/v1/agent/sessions/{opened[0]['session_id']}/messages"
        followed = await send_twice(url, {"message": "It still fails"})
    assert opened[0] == opened[1]
    assert followed[0] == followed[1]
    assert len(toy.workplaces.leases) == 2


async def test_an_opening_repeated_after_a_follow_up_leaves_the_session_as_it_is(toy: Toy) -> None:
    headers = {"Idempotency-Key": "k"}
    async with toy.client() as client:
        opened, url = [], ""
        for message in ("It still fails", "And now?"):
            answer = await client.post("/v1/agent/sessions", json=REQUEST, headers=headers)
            opened.append(answer.json())
            url = f"/v1/agent/sessions/{opened[0]['session_id']}/messages"
            assert (await client.post(url, json={"message": message})).status_code == 200
    assert opened[0] == opened[1]
    assert len(toy.workplaces.leases) == 3


async def test_the_second_request_with_a_key_works_where_the_first_failed(toy: Toy) -> None:
    headers = {"Idempotency-Key": "k"}
    toy.workplaces.failure = CapacityExhausted("none")
    async with toy.client() as client:
        refused = await client.post("/v1/agent/sessions", json=REQUEST, headers=headers)
        toy.workplaces.failure = None
        answer = await client.post("/v1/agent/sessions", json=REQUEST, headers=headers)
    assert (refused.status_code, answer.status_code) == (503, 200)
