"""Sessions of made-up clients: a model whose tokens show where they went, and what clients do with histories."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import SecretStr

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.transcript import EndReason, Transcript
from ostinato.infra.platform.errors import EngineError
from ostinato.infra.serving.attempts.session import AttemptSession
from ostinato.infra.serving.gateway.answers.generation import Answering
from ostinato.infra.serving.gateway.config import GatewayConfig, TenantConfig
from ostinato.infra.serving.gateway.schemas import ChatMessage, ChatRequest
from ostinato.models.decode.protocol import GenerateRequest, Generation, ModelClient, StopReason
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.models.rendering.vocabulary import SPECIAL_TOKENS

RENDERER = Renderer(train_tokenizer(["a user asks, an answer comes, it is said again"] * 3, 400))


@dataclass
class Sampler:
    """A model that draws tokens which its own text does not encode to. Each has a log-probability of its own."""

    end: StopReason = StopReason.STOP_TOKEN
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    asked: list[tuple[GenerateRequest, Generation]] = field(default_factory=list)
    num_sampled: int = 0
    longest: int = 5
    wait: asyncio.Event | None = None
    failures: int = 0  # requests that fail from now on
    ended_sessions: list[str] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.wait is not None:
            await self.wait.wait()
        if self.failures:
            self.failures -= 1
            raise EngineError("the replica is gone")
        length = request.max_new_tokens
        if self.end is StopReason.STOP_TOKEN:
            length = min(int(self.chance.integers(1, self.longest + 1)), length)
        ids = self.chance.integers(len(SPECIAL_TOKENS), RENDERER.vocab_size, length).tolist()
        if self.end is StopReason.STOP_TOKEN:
            ids[-1] = RENDERER.end_id
        first = self.num_sampled
        self.num_sampled += length
        generation = Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs_T=-np.arange(first, self.num_sampled, dtype=np.float32),
            weight_versions_T=np.full(length, len(self.asked), dtype=np.int64),
            routed_experts=np.zeros((0, 1, 1), dtype=np.int16),
            route_offset=0,
            stop_reason=self.end,
        )
        self.asked.append((request, generation))
        return generation

    async def end_session(self, session_id: str) -> None:
        self.ended_sessions.append(session_id)


def open_session(model: ModelClient, **limits: Any) -> AttemptSession:
    nobody = TenantConfig(name="nobody", api_keys=(SecretStr("none"),))
    harness = HarnessConfig(
        **{"context_tokens": 4000, "max_generated_tokens": 4000, "max_turns": 500} | limits
    )
    config = GatewayConfig(line="attempts", tenants=(nobody,), harness=harness)
    request = AgentRequest(prompt="", session_id="run.g0.t1", seed=5)
    return AttemptSession(model, RENDERER, request, config, lambda: 0.0)


def said(role: str, text: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": text})


async def begin(
    session: AttemptSession, messages: Sequence[ChatMessage], **fields: Any
) -> Answering:
    asked = ChatRequest(model="ostinato", messages=list(messages), **fields)
    return await session.begin(asked, session.caller, None)


async def to_end(session: AttemptSession, answering: Answering) -> None:
    """Reads a whole answer, streamed if it was asked for so."""
    if answering.request.stream:
        async for _ in session.stream(answering):
            await asyncio.sleep(0)
    else:
        await session.answer(answering)


async def ask(
    session: AttemptSession, messages: Sequence[ChatMessage], max_tokens: int = 6
) -> list[ChatMessage]:
    """The history with its answer."""
    answering = await begin(session, messages, max_tokens=max_tokens)
    finished = await session.answer(answering)
    answering.is_delivered = True
    return [*messages, said("assistant", finished.message.text)]


def ended(session: AttemptSession) -> Transcript:
    return session.transcript(EndReason.FINISHED, "", "", 0.0)


def check_exact(model: Sampler, transcript: Transcript) -> None:
    """Each sampled token is trained once, behind exactly the tokens that it was sampled from."""
    places: dict[float, tuple[int, int]] = {}
    for number, segment in enumerate(transcript.segments):
        for place in np.flatnonzero(segment.loss_mask_T).tolist():
            places.setdefault(float(-segment.logprobs_T[place]), (number, place))
    assert sum(one.sampled_tokens for one in transcript.segments) == model.num_sampled
    assert len(places) == model.num_sampled
    for version, (request, generation) in enumerate(model.asked):
        number, start = places[float(-generation.logprobs_T[0])]
        segment, end = transcript.segments[number], start + len(generation.token_ids)
        assert tuple(segment.token_ids_T[start:end].tolist()) == generation.token_ids
        assert tuple(segment.token_ids_T[:start].tolist()) == request.token_ids
        assert set(segment.weight_versions_T[start:end].tolist()) == {version}
    runs = [turn.generated_tokens for turn in transcript.turns]
    edges = [np.diff(np.append(0, np.append(s.loss_mask_T, 0))) for s in transcript.segments]
    lengths = [(np.flatnonzero(each == -1) - np.flatnonzero(each == 1)).tolist() for each in edges]
    assert runs == list(itertools.chain(*lengths))


def prefixes(sequences: Sequence[Sequence[int]]) -> dict[int, int]:
    """The last token of each beginning of a sequence, by the beginning's hash."""
    found = {}
    for tokens in sequences:
        name = 0
        for token in tokens:
            name = hash((name, token))
            found[name] = token
    return found


STEPS = ("go on", "edit", "strip", "again", "both", "begin", "compact")


async def play(session: AttemptSession, steps: Sequence[tuple[str, int]]) -> None:
    histories = [await ask(session, [said("user", "a user asks")])]
    for number, (step, which) in enumerate(steps):
        history = histories[which % len(histories)]
        more = said("user", f"it is said {number}")
        if step == "go on":
            histories.append(await ask(session, [*history, more]))
        elif step == "edit":  # an earlier message of the user's
            users = [place for place, one in enumerate(history) if one.role == "user"]
            place = users[which % len(users)]
            histories.append(await ask(session, [*history[:place], more]))
        elif step == "strip":  # an answer without its beginning
            answers = [place for place, one in enumerate(history) if one.role == "assistant"]
            place = answers[which % len(answers)]
            cut = said("assistant", history[place].text[1:] or "x")
            stripped = [*history[:place], cut, *history[place + 1 :]]
            histories.append(await ask(session, [*stripped, more]))
        elif step == "again":
            histories.append(await ask(session, history[:-1]))
        elif step == "both":
            asked = [[*history, more], [*history, more, said("user", "and again")]]
            histories += await asyncio.gather(*(ask(session, one) for one in asked))
        elif step == "compact":
            histories.append(await ask(session, [said("user", f"so far: {history[-1].text}")]))
        else:
            histories.append(await ask(session, [said("system", "a user"), more]))
