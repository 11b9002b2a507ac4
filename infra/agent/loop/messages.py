"""Attempts by a model behind an OpenAI-style API.

`MessageConversation` runs the loop and tools of training over `/v1/chat/completions`. The server keeps the tokens (our
gateway continues exactly the tokens that it sampled), so there are no segments here. Works with any server of the
format; our own also names the interaction that it recorded for each answer.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.dialects.dialect import dialect_of, offered_tools
from ostinato.infra.agent.dialects.full.calls import call_from_json
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import OnTurn, first_messages, run_conversation
from ostinato.infra.agent.loop.conversation import (
    INTERRUPTED,
    CallReader,
    ModelAnswer,
    call_reader,
    cut_to_fit,
)
from ostinato.infra.agent.tools.calls import ParsedAnswer, ParsedCall
from ostinato.infra.agent.tools.definition import Tool, tool_schemas
from ostinato.infra.agent.tools.mcp_servers import start_servers
from ostinato.infra.agent.transcript import Segment, Transcript
from ostinato.infra.platform.errors import ConfigError, EngineError, boundary

CHARACTERS_PER_TOKEN = 3.5  # of results the server has not counted yet
INTERACTION_HEADER = "x-ostinato-interaction"
SESSION_HEADER = "x-ostinato-session"


@dataclass(slots=True)
class MessageConversation:
    """Messages so far, and the client that sends them."""

    client: httpx2.AsyncClient  # with the server's address and the key
    model_name: str
    tools: Mapping[str, Tool]
    read_calls: CallReader  # for calls a server leaves in the text
    read_edits: CallReader  # for the text beside calls that the server has read
    prompt: str
    system_prompt: str | None = None
    temperature: float = 1.0
    session_id: str = ""
    sends_max_tokens: bool = True
    """False for servers whose context may be smaller than the harness's: they refuse larger limits"""
    messages: list[dict[str, Any]] = field(default_factory=list)
    interaction_ids: list[str] = field(default_factory=list)
    prompt_tokens: int | None = 0
    """tokens of messages that the model did not generate, each counted once; None: the server counts none"""
    _read_tokens: int = 0  # of the newest request and its answer
    _counted_tokens: int = 0
    _uncounted_characters: int = 0
    _pending_ids: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that the server counted, plus an estimate of those it has not seen yet."""
        return self._counted_tokens + int(self._uncounted_characters / CHARACTERS_PER_TOKEN)

    async def answer(self, max_new_tokens: int) -> ModelAnswer:
        body = {
            "model": self.model_name,
            "messages": self.messages,
            "tools": tool_schemas(self.tools.values()),
            "temperature": self.temperature,
        } | ({"max_tokens": max_new_tokens} if self.sends_max_tokens else {})
        reply = await self._post(body)
        if reply is None:
            return ModelAnswer("", ParsedAnswer((), ""), 0, is_whole=False, cut_reason="context")
        with boundary(EngineError, f"{self.client.base_url} answers no chat completion"):
            return self._read(reply.json())

    def _read(self, reply: Any) -> ModelAnswer:
        """Returns the answer in a reply and appends it to the messages."""
        choice = reply["choices"][0]
        message = choice["message"]
        usage = reply.get("usage") or {}
        self._counted_tokens = int(usage.get("total_tokens", self.num_tokens))
        if self.prompt_tokens is not None:
            sent = usage.get("prompt_tokens")
            new = None if sent is None else max(0, int(sent) - self._read_tokens)
            self.prompt_tokens = None if new is None else self.prompt_tokens + new
            self._read_tokens = self._counted_tokens
        self._uncounted_characters = 0
        is_whole = choice["finish_reason"] in ("stop", "tool_calls")
        content = message.get("content") or ""
        calls = [
            _completed(call, f"call_{index}")
            for index, call in enumerate(message.get("tool_calls") or [], start=1)
        ]
        self.messages.append(
            {"role": "assistant", "content": content or None}
            | ({"tool_calls": calls} if calls else {})
        )
        parsed = self._parse(content, calls) if is_whole else ParsedAnswer((), content)
        # calls that the server left in the text have no ids
        self._pending_ids = [call.call_id or None for call in parsed.calls]
        functions = [call["function"] for call in calls]
        written = "".join(f"\n{each['name']}({each['arguments']})" for each in functions)
        return ModelAnswer(
            text=content + written,
            parsed=parsed,
            generated_tokens=int(usage.get("completion_tokens", 0)),
            is_whole=is_whole,
            cut_reason="" if is_whole else str(choice["finish_reason"]),
        )

    def append_results(
        self, results: Sequence[str], note: str | None, room_tokens: int | None
    ) -> None:
        """One tool message per call, in call order. The note ends the last."""
        texts = list(results)
        if room_tokens is not None:
            each = int(max(0, room_tokens) * CHARACTERS_PER_TOKEN / max(1, len(texts)))
            texts = [text if len(text) <= each else cut_to_fit(text, each) for text in texts]
        if note is not None and texts:
            texts[-1] = f"{texts[-1]}\n[{note}]"
        has_ids = any(call_id is not None for call_id in self._pending_ids)
        for call_id, text in zip(self._pending_ids, texts, strict=True):
            if call_id is not None:
                self._append({"role": "tool", "content": text, "tool_call_id": call_id})
            else:  # after results with ids, servers refuse results without
                self._append({"role": "user" if has_ids else "tool", "content": text})
        self._pending_ids = []

    def append_user(self, text: str) -> None:
        """Adds a message of the user. Interrupted calls are answered first."""
        if self._pending_ids:
            self.append_results([INTERRUPTED] * len(self._pending_ids), None, None)
        self._append({"role": "user", "content": text})

    async def restart(self, prompt: str) -> None:
        """Forgets the messages. The next conversation begins with `prompt`."""
        self._open(prompt)

    def segments(self) -> tuple[Segment, ...]:
        """Always empty: the server keeps the tokens."""
        return ()

    async def close(self) -> None:
        """Does nothing: the client belongs to whoever opened it."""

    def _open(self, prompt: str) -> None:
        self.messages, self._pending_ids, self._read_tokens = [], [], 0
        self._counted_tokens = self._uncounted_characters = 0
        if self.system_prompt is not None:
            self._append({"role": "system", "content": self.system_prompt})
        self.append_user(prompt)

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._uncounted_characters += len(message["content"])

    def _parse(self, content: str, calls: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        if not calls:
            return self.read_calls(content, False)
        edits = self.read_edits(content, False)
        called = (self._parse_call(call) for call in calls)
        return ParsedAnswer((*called, *edits.calls), edits.prose)

    def _parse_call(self, call: Mapping[str, Any]) -> ParsedCall:
        function = call["function"]
        return call_from_json(function["name"], function["arguments"], self.tools, call["id"])

    async def _post(self, body: dict[str, Any]) -> httpx2.Response | None:
        """The reply. None when the messages are longer than the server's context."""
        headers = {SESSION_HEADER: self.session_id} if self.session_id else {}
        try:
            response = await self.client.post("/chat/completions", json=body, headers=headers)
        except httpx2.HTTPError as error:
            where = self.client.base_url
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code == 400 and _is_too_long(response):
            return None
        if response.status_code != 200:
            # a 400 to the first message would repeat; a later one may come from the model's answers
            has_answered = any(message["role"] == "assistant" for message in self.messages)
            wrong = (401, 403, 404) if has_answered else (400, 401, 403, 404)
            kind = ConfigError if response.status_code in wrong else EngineError
            raise kind(f"{self.client.base_url} says {response.status_code}: {_said(response)}")
        if INTERACTION_HEADER in response.headers:
            self.interaction_ids.append(response.headers[INTERACTION_HEADER])
        return response


def _completed(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """The call with an id and textual arguments. Some servers send no id, or parsed arguments."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        **call,
        "id": call.get("id") or call_id,
        "function": {**function, "arguments": written},
    }


def _is_too_long(response: httpx2.Response) -> bool:
    """Whether the messages exceed the context, by OpenAI's error code, or by the message of other servers."""
    return "context_length" in response.text or "context length" in response.text


def _said(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


async def run_agent_outside(
    client: httpx2.AsyncClient,
    model_name: str,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_turn: OnTurn | None = None,
) -> Transcript:
    """Runs the attempt to its end, like `run_agent`, with a model behind an API."""
    if environment.dialogue is not None:
        raise ConfigError(
            "the problem's environment holds the dialogue itself, wanted an engine that gives tokens, "
            "not the address of a server"
        )
    await start_servers(environment, config)
    conversation = open_messages(client, model_name, environment, request, config)
    transcript = await run_conversation(
        conversation, environment, request.prompt, config, clock=clock, on_turn=on_turn
    )
    return transcript.model_copy(update={"prompt_tokens": conversation.prompt_tokens})


def open_messages(
    client: httpx2.AsyncClient,
    model_name: str,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
    session_id: str = "",
    *,
    sends_max_tokens: bool = True,
) -> MessageConversation:
    """The attempt's conversation in messages, opened with the dialect's prompts. `session_id` is sent
    to the server in a header.
    """
    policy = environment.policy_under(config)
    tools = offered_tools(config, policy, environment.tools)
    states_tools = dialect_of(config).is_published  # the server, to which they are sent
    system, prompt = first_messages(request, config, tools, policy, states_tools=states_tools)
    return MessageConversation(
        client=client,
        model_name=model_name,
        tools=tools,
        read_calls=call_reader(config, policy, environment.tools),
        read_edits=call_reader(config, policy, environment.tools, reads_calls=False),
        prompt=prompt,
        system_prompt=system,
        temperature=request.temperature,
        session_id=session_id,
        sends_max_tokens=sends_max_tokens,
    )
