"""The conversation over an OpenAI-style API: the same loop, one tool message a call, no token lost."""

import asyncio
import json
from collections.abc import Callable

import httpx2
import pytest

from ostinato.infra.agent.config import HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.full.tools import FULL_TOOLS
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_conversation
from ostinato.infra.agent.loop.conversation import INTERRUPTED, call_reader
from ostinato.infra.agent.loop.messages import MessageConversation
from ostinato.infra.agent.transcript import CallStatus, EndReason, Transcript
from ostinato.infra.platform.errors import ConfigError
from tests.fakes.memory_sandbox import MemorySandbox

FULL = HarnessConfig(dialect="full", context_tokens=9000, max_generated_tokens=9000, max_turns=9)


class Server:
    """Answers chat completions from a script and keeps what it was sent."""

    def __init__(self, *answers: dict | int) -> None:
        self.answers, self.bodies = list(answers), []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        answer = self.answers[len(self.bodies) - 1]
        if isinstance(answer, int):
            return httpx2.Response(answer, json={"error": {"message": "why", "code": "c"}})
        reason = "tool_calls" if answer.get("tool_calls") else "stop"
        choice = {"message": {"role": "assistant"} | answer, "finish_reason": reason}
        usage = answer.get("usage", {"completion_tokens": 5, "total_tokens": 100})
        return httpx2.Response(200, json={"choices": [choice], "usage": usage})


def tool_call(call_id: str, name: str, **arguments: object) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def converse(
    server: Callable[[httpx2.Request], httpx2.Response], config: HarnessConfig = FULL
) -> tuple[Transcript, MessageConversation]:
    async def run() -> tuple[Transcript, MessageConversation]:
        transport = httpx2.MockTransport(server)
        async with httpx2.AsyncClient(transport=transport, base_url="http://model/v1") as client:
            tools = dict(FULL_TOOLS)
            conversation = MessageConversation(
                client,
                "m",
                tools,
                call_reader(config, ToolPolicy()),
                call_reader(config, ToolPolicy(), reads_calls=False),
                prompt="Fix it",
                system_prompt="Be good",
            )
            environment = AgentEnvironment(MemorySandbox({"a.txt": b"one\n"}))
            return await run_conversation(conversation, environment, "Fix it", config), conversation

    return asyncio.run(run())


def test_calls_come_back_under_their_ids_in_call_order() -> None:
    calls = [tool_call("x", "read_file", path="a.txt"), tool_call("y", "read_file", offset=1)]
    server = Server({"content": None, "tool_calls": calls}, {"content": "Done."})
    transcript, _ = converse(server)
    assert transcript.end_reason is EndReason.FINISHED
    assert [call.status for call in transcript.turns[0].calls] == [
        *(CallStatus.OK, CallStatus.INVALID_ARGUMENTS),
    ]
    sent = server.bodies[1]["messages"]
    assert [message["role"] for message in sent] == [
        *("system", "user", "assistant", "tool", "tool"),
    ]
    assert [message["tool_call_id"] for message in sent[3:]] == ["x", "y"]
    assert sent[3]["content"] == "[x read_file ok]\n1\tone"
    assert sent[:2] == server.bodies[0]["messages"]


def counted(prompt: int, completion: int) -> dict:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def test_prompt_tokens_count_once_though_each_request_repeats_them() -> None:
    calls = [tool_call("x", "read_file", path="a.txt")]
    first = {"content": None, "tool_calls": calls, "usage": counted(40, 10)}
    _, conversation = converse(Server(first, {"content": "Done.", "usage": counted(57, 3)}))
    assert conversation.prompt_tokens == 40 + 7
    _, conversation = converse(Server(first, {"content": "Done."}))  # a server that stops counting
    assert conversation.prompt_tokens is None


def test_text_beside_calls_that_the_server_read_holds_edits_and_no_calls() -> None:
    edit = "a.txt\n<<<<<<< SEARCH\none\n=======\ntwo\n>>>>>>> REPLACE"
    shown = '<call tool="read_file"><path>a.txt</path></call>'
    config = FULL.model_copy(update={"edits": "search_replace"})
    answer = {
        "content": f"{shown}\n{edit}",
        "tool_calls": [tool_call("x", "read_file", path="a.txt")],
    }
    server = Server(answer, {"content": "Done."})
    transcript, _ = converse(server, config)
    assert [call.tool for call in transcript.turns[0].calls] == ["read_file", "edit_file"]
    sent = server.bodies[1]["messages"][3:]
    assert [message["role"] for message in sent] == ["tool", "user"]
    assert sent[0]["tool_call_id"] == "x"
    transcript, _ = converse(Server({**answer, "content": shown}, {"content": "Done."}))
    assert len(transcript.turns[0].calls) == 1


def test_calls_left_in_the_text_are_read_from_it() -> None:
    server = Server({"content": '<call tool="glob">x</call>'}, {"content": "Done."})
    transcript, _ = converse(server)
    assert transcript.turns[0].calls[0].status is CallStatus.MALFORMED
    assert server.bodies[1]["messages"][-1]["role"] == "tool"


def test_interrupted_calls_are_answered_before_the_next_message() -> None:
    server = Server({"content": "Done."})
    _, conversation = converse(server)
    conversation._pending_ids = ["x", "y"]
    conversation.append_user("Stop")
    tail = conversation.messages[-3:]
    assert [message["content"] for message in tail] == [INTERRUPTED, INTERRUPTED, "Stop"]


def test_a_server_that_fails_ends_the_attempt_and_a_wrong_request_raises() -> None:
    transcript, _ = converse(Server(503))
    assert transcript.end_reason is EndReason.ENGINE_FAILED
    assert "says 503: why" in transcript.detail
    with pytest.raises(ConfigError, match="says 401: why"):
        converse(Server(401))


def test_messages_longer_than_the_context_of_the_server_end_the_attempt() -> None:
    error = {"message": "maximum context length is 9", "code": "context_length_exceeded"}

    def refuse(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(400, json={"error": error})

    transcript, _ = converse(refuse)
    assert transcript.end_reason is EndReason.TOKEN_LIMIT


def test_calls_without_id_or_with_parsed_arguments_run() -> None:
    first = {"function": {"name": "read_file", "arguments": {"path": "a.txt"}}}
    second = {"id": None, "function": {"name": "read_file", "arguments": "{not JSON"}}
    server = Server({"tool_calls": [first, second]}, {"content": "Done."})
    transcript, _ = converse(server)
    assert [call.status for call in transcript.turns[0].calls] == [
        *(CallStatus.OK, CallStatus.MALFORMED),
    ]
    sent = server.bodies[1]["messages"]
    assert [call["id"] for call in sent[2]["tool_calls"]] == ["call_1", "call_2"]
    assert [message["tool_call_id"] for message in sent[3:]] == ["call_1", "call_2"]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{}]}'])
def test_a_body_that_is_no_answer_ends_the_attempt(body: bytes) -> None:
    transcript, _ = converse(lambda _: httpx2.Response(200, content=body))
    assert transcript.end_reason is EndReason.ENGINE_FAILED
    assert "answers no chat completion" in transcript.detail


def test_a_server_that_refuses_its_own_answer_ends_the_attempt() -> None:
    calls = [tool_call("x", "read_file", path="a.txt")]
    transcript, _ = converse(Server({"tool_calls": calls}, 400))
    assert transcript.end_reason is EndReason.ENGINE_FAILED
    assert len(transcript.turns) == 1
    with pytest.raises(ConfigError, match="says 400"):
        converse(Server(400))
