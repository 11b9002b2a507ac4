"""Keys, limits, consent, feedback, arms, status."""

import pytest

from ostinato.infra.serving.gateway.arms import Arm, ArmTable
from ostinato.infra.serving.gateway.signals import GATEWAY_SIGNALS
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.toy_gateway import BROKEN, Toy

pytestmark = pytest.mark.asyncio

SESSION = {
    "repository": "toy",
    "message": "Fix first in pkg/first.py",
    "files": {"pkg/first.py": BROKEN},
}
CHAT = {"model": "ostinato", "messages": [{"role": "user", "content": "Fix first"}]}


async def test_unknown_key_is_refused(toy: Toy) -> None:
    async with toy.client("wrong") as client:
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/v1/status"),
            ("POST", "/v1/feedback"),
        ]:
            answer = await client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/healthz")).json() == {"status": "ok"}


async def test_rate_limit_says_when_to_come_back(toy: Toy) -> None:
    async with toy.client("key-of-slow") as client:
        codes = [(await client.get("/v1/models")).status_code for _ in range(3)]
        refused = await client.get("/v1/models")
        toy.now[0] += 1.0
        later = await client.get("/v1/models")
    assert codes == [200, 200, 429]
    assert int(refused.headers["retry-after"]) >= 1
    assert later.status_code == 200


async def test_one_tenants_limit_leaves_others_alone(toy: Toy) -> None:
    async with toy.client("key-of-slow") as slow, toy.client() as client:
        for _ in range(5):
            await slow.get("/v1/models")
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("key", "change", "header"),
    [
        ("key-of-private", {}, {"X-Ostinato-Store": "true"}),
        ("key-of-team", {"store": False}, {}),
        ("key-of-team", {"store": True}, {"X-Ostinato-Store": "false"}),
    ],
)
async def test_without_consent_only_counters_move(
    toy: Toy, key: str, change: dict[str, bool], header: dict[str, str]
) -> None:
    async with toy.client(key) as client:
        client.headers.update(header)
        agent = (await client.post("/v1/agent/sessions", json=SESSION | change)).json()
        chat = (await client.post("/v1/chat/completions", json=CHAT | change)).json()
        feedback = await client.post(
            "/v1/feedback", json={"interaction_id": agent["interaction_id"], "signal": "edit_kept"}
        )
        status = (await client.get("/v1/status")).json()
    assert agent["status"] == "finished"
    assert chat["choices"][0]["message"]["content"]
    assert feedback.json()["stored"] is False
    assert toy.ledger.interactions.since(0) == []
    assert toy.objects.list("") == []
    assert status["counters"]["interactions.without_consent"] == 2


async def test_feedback_reaches_the_ledger_once_per_id(toy: Toy) -> None:
    async with toy.client() as client:
        answer = (await client.post("/v1/agent/sessions", json=SESSION)).json()
        body = {
            "interaction_id": answer["interaction_id"],
            "signal": "edit_survived",
            "value": 0.5,
            "feedback_id": "f",
        }
        answers = [(await client.post("/v1/feedback", json=body)).json() for _ in range(2)]
    assert answers == [{"stored": True, "feedback_id": "f"}] * 2
    (row,) = toy.ledger.interactions.since(0)
    assert ("edit_survived", 0.5) in [(said.signal, said.value) for said in row.feedback]
    assert len(row.feedback) == len(GATEWAY_SIGNALS) + 1


async def test_feedback_on_another_tenants_interaction_is_unknown(toy: Toy) -> None:
    async with toy.client() as client, toy.client("key-of-slow") as stranger:
        answer = (await client.post("/v1/agent/sessions", json=SESSION)).json()
        body = {"interaction_id": answer["interaction_id"], "signal": "edit_reverted"}
        assert (await stranger.post("/v1/feedback", json=body)).status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"signal": "liked"}, "signal"),
        *(({"signal": signal}, "signal") for signal in GATEWAY_SIGNALS),
        ({"value": "much"}, "value"),
    ],
)
async def test_bad_feedback_names_the_field(toy: Toy, change: dict[str, str], field: str) -> None:
    async with toy.client() as client:
        body = {"interaction_id": "interaction-1", "signal": "edit_kept"} | change
        answer = await client.post("/v1/feedback", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


async def test_arms_are_stable_and_close_to_their_share(toy: Toy) -> None:
    control = Arm("control", "nano@1", 1, toy.model)
    table = ArmTable(control, Arm("candidate", "nano@2", 2, toy.model), share=0.3)
    sessions = [f"session-{index}" for index in range(2_000)]
    chosen = [table.choose(session).name for session in sessions]
    assert chosen == [table.choose(session).name for session in sessions]
    assert abs(chosen.count("candidate") / 2_000 - 0.3) < 0.04
    table.set(control, Arm("candidate", "nano@3", 3, toy.model), share=0.3)
    moved = [table.choose(session).name for session in sessions]
    assert moved != chosen  # another experiment, another draw
    table.set(control)
    assert {table.choose(session).name for session in sessions} == {"control"}


async def test_candidate_arm_serves_and_is_recorded(toy: Toy) -> None:
    other = AnsweringModel(toy.context.renderer, toy.model.answer, weight_version=9)
    toy.context.arms.set(toy.context.arms.control, Arm("candidate", "nano@2", 9, other), share=0.5)
    async with toy.client() as client:
        for _ in range(12):
            await client.post("/v1/agent/sessions", json=SESSION)
    arms = {(row.arm, row.weight_version) for row in toy.ledger.interactions.since(0)}
    assert arms == {("control", 4), ("candidate", 9)}


async def test_feedback_that_contradicts_an_earlier_one_is_refused(toy: Toy) -> None:
    async with toy.client() as client:
        answer = (await client.post("/v1/agent/sessions", json=SESSION)).json()
        body = {"interaction_id": answer["interaction_id"], "signal": "edit_survived", "value": 0.5}
        codes = [
            (await client.post("/v1/feedback", json=body | change)).status_code
            for change in ({}, {}, {"value": 0.25}, {"value": 0.25, "feedback_id": "later"})
        ]
        status = (await client.get("/v1/status")).json()
    assert codes == [200, 200, 409, 200]
    (row,) = toy.ledger.interactions.since(0)
    assert [said.value for said in row.feedback if said.signal == "edit_survived"] == [0.5, 0.25]
    assert status["counters"]["feedback.edit_survived"] == 2


async def test_every_refusal_has_openais_shape(toy: Toy) -> None:
    async with toy.client() as client, toy.client("wrong") as stranger:
        answers = [
            await client.get("/nowhere"),
            await client.put("/v1/models"),
            await client.post("/v1/chat/completions", content=b"{"),
            await client.post("/v1/chat/completions", json={}),
            await client.post("/v1/feedback", json={"interaction_id": "x", "signal": "thumbs_up"}),
            await client.delete("/v1/agent/sessions/none"),
            await client.get("/metrics"),
            await stranger.get("/v1/status"),
        ]
    assert [answer.status_code for answer in answers] == [404, 405, 400, 400, 404, 404, 403, 401]
    for answer in answers:
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
