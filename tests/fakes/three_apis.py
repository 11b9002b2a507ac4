"""One conversation through each of the gateway's three APIs, whole and streamed, over a scripted model."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx2
import numpy as np

from ostinato.models.decode.protocol import GenerateRequest, Generation, StopReason
from ostinato.models.rendering import Renderer

Call = tuple[str, dict[str, Any]]
Messages = Sequence[dict[str, Any]]


class ScriptedModel:
    """An engine that samples one script of tokens after another, and stops where a request's stop token comes.

    `pauses` are waited for before the token of that place, `never` is a place that it does not pass.
    """

    def __init__(self, renderer: Renderer, *scripts: str | Sequence[int]) -> None:
        self.renderer, self.requests = renderer, list[GenerateRequest]()
        self.scripts = [
            renderer.encode_answer(script) if isinstance(script, str) else list(script)
            for script in scripts
        ]
        self.pauses: dict[int, float] = {}
        self.never: int | None = None
        self.num_cancelled = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        done = int(request.request_id.rpartition("/")[2])
        if not done and self.requests:
            self.scripts.append(self.scripts.pop(0))
        self.requests.append(request)
        ids: list[int] = []
        try:
            for place, token_id in enumerate(self.scripts[0][done:], start=done):
                if place == self.never:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.pauses.get(place, 0))
                ids.append(token_id)
                if token_id in request.stop_token_ids or len(ids) == request.max_new_tokens:
                    break
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        is_end = ids[-1] in request.stop_token_ids
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=np.full(len(ids), -0.5, dtype=np.float32),
            weight_versions_T=np.zeros(len(ids), dtype=np.int64),
            routed_experts=np.zeros((0, 0, 0), dtype=np.int16),
            route_offset=0,
            stop_reason=StopReason.STOP_TOKEN if is_end else StopReason.LENGTH,
        )

    async def end_session(self, session_id: str) -> None:
        return None

    @property
    def prompts(self) -> list[str]:
        """What the model was asked, a text for each answer."""
        firsts = (each for each in self.requests if each.request_id.endswith("/0"))
        return [self.renderer.decode(each.token_ids) for each in firsts]


@dataclass
class Answer:
    """An answer as a client has it. `ids` are those of its calls."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    ending: str = ""
    pings: int = 0

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        self.calls.append((name, given))
        self.ids.append(call_id)


@dataclass(frozen=True)
class Api:
    """How one API asks and answers. `body` takes messages and functions in OpenAI's form for chats."""

    name: str
    path: str
    body: Callable[[Messages, list[str], dict[str, Any]], dict[str, Any]]
    read: Callable[[dict[str, Any]], Answer]
    join: Callable[[list[dict[str, Any]]], Answer]

    async def post(
        self, client: httpx2.AsyncClient, messages: Messages, tools: list[str], **more: Any
    ) -> httpx2.Response:
        return await client.post(self.path, json=self.body(messages, tools, more), timeout=30)

    async def ask(
        self,
        client: httpx2.AsyncClient,
        messages: Messages,
        tools: list[str],
        *,
        streams: bool,
        **more: Any,
    ) -> Answer:
        """The answer, by the whole body or by the events."""
        reply = await self.post(client, messages, tools, stream=streams, **more)
        assert reply.status_code == 200, reply.text
        if not streams:
            return self.read(reply.json())
        blocks = [block for block in reply.text.split("\n\n") if block]
        data = [block.partition("data: ")[2] for block in blocks if not block.startswith(":")]
        events = [json.loads(each) for each in data if each != "[DONE]"]
        answer = self.join([event for event in events if event.get("type") != "ping"])
        pings = [block for block in blocks if block.startswith(":")]
        answer.pings = len(pings) + sum(event.get("type") == "ping" for event in events)
        return answer


def _parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {"path": {"type": "string"}}}


def _chat_body(messages: Messages, tools: list[str], more: dict[str, Any]) -> dict[str, Any]:
    functions = [
        {"type": "function", "function": {"name": name, "parameters": _parameters()}}
        for name in tools
    ]
    return {"model": "ostinato", "messages": list(messages), "tools": functions} | more


def _read_chat(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    answer = Answer(choice["message"]["content"] or "", ending=choice["finish_reason"])
    for call in choice["message"].get("tool_calls", ()):
        answer.add_call(call["id"], call["function"]["name"], call["function"]["arguments"])
    return answer


def _join_chat(events: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for event in events:
        (choice,) = event["choices"]
        answer.text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            answer.add_call(call["id"], call["function"]["name"], call["function"]["arguments"])
        answer.ending = choice["finish_reason"] or answer.ending
    return answer


def _blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        result = {"type": "tool_result", "content": message["content"]}
        return [result | {"tool_use_id": message["tool_call_id"]}]
    text = message.get("content")
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        used = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append(used | {"input": json.loads(function["arguments"])})
    return blocks


def _messages_body(messages: Messages, tools: list[str], more: dict[str, Any]) -> dict[str, Any]:
    said = [
        ("user" if message["role"] == "tool" else message["role"], block)
        for message in messages
        for block in _blocks_of(message)
    ]
    turns = [
        {"role": role, "content": [block for _, block in group]}
        for role, group in groupby(said, key=lambda pair: pair[0])
    ]
    declared = [{"name": name, "input_schema": _parameters()} for name in tools]
    if "stop" in more:
        more = {**more, "stop_sequences": more["stop"]}
        del more["stop"]
    body = {"model": "ostinato", "max_tokens": 400, "messages": turns, "tools": declared}
    return body | more


_ANTHROPIC_ENDINGS = {
    "end_turn": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "stop_sequence": "stop",
}


def _read_messages(body: dict[str, Any]) -> Answer:
    answer = Answer(ending=_ANTHROPIC_ENDINGS[body["stop_reason"]])
    for block in body["content"]:
        if block["type"] == "text":
            answer.text += block["text"]
        else:
            answer.add_call(block["id"], block["name"], block["input"])
    return answer


def _join_messages(events: list[dict[str, Any]]) -> Answer:
    answer, opened = Answer(), {}
    for event in events:
        if event["type"] == "content_block_start":
            opened = event["content_block"]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            answer.text += delta.get("text", "")
            if "partial_json" in delta:
                answer.add_call(opened["id"], opened["name"], delta["partial_json"])
        elif event["type"] == "message_delta":
            answer.ending = _ANTHROPIC_ENDINGS[event["delta"]["stop_reason"]]
    assert events[-1]["type"] == "message_stop"
    return answer


def _responses_body(messages: Messages, tools: list[str], more: dict[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {"type": "function_call_output", "output": message["content"]}
            items.append(result | {"call_id": message["tool_call_id"]})
            continue
        if message.get("content"):
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"]} | call["function"])
    declared = [{"type": "function", "name": name, "parameters": _parameters()} for name in tools]
    if "max_tokens" in more:
        more = {**more, "max_output_tokens": more["max_tokens"]}
        del more["max_tokens"]
    return {"model": "ostinato", "input": items, "tools": declared} | more


def _read_response(body: dict[str, Any]) -> Answer:
    answer = Answer()
    for item in body["output"]:
        if item["type"] == "message":
            answer.text += "".join(part["text"] for part in item["content"])
        else:
            answer.add_call(item["call_id"], item["name"], item["arguments"])
    whole = "tool_calls" if answer.calls else "stop"
    answer.ending = "length" if body["status"] == "incomplete" else whole
    return answer


def _join_response(events: list[dict[str, Any]]) -> Answer:
    answer = _read_response(events[-1]["response"])
    kinds = {event["type"] for event in events}
    shown = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(shown) == answer.text
    assert ("response.function_call_arguments.done" in kinds) == bool(answer.calls)
    return answer


APIS = {
    api.name: api
    for api in (
        Api("chat", "/v1/chat/completions", _chat_body, _read_chat, _join_chat),
        Api("messages", "/v1/messages", _messages_body, _read_messages, _join_messages),
        Api("responses", "/v1/responses", _responses_body, _read_response, _join_response),
    )
}
