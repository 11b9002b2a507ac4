"""Chat completions: one answer of the model to a client that runs the tools itself."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.infra.agent.dialects.thoughts import opens_thought
from ostinato.infra.agent.loop.segments import SegmentBuilder
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.transcript import (
    EndReason,
    SamplingDistribution,
    ToolCallRecord,
    Transcript,
    TurnRecord,
)
from ostinato.infra.platform.errors import OstinatoError
from ostinato.infra.serving.gateway.answers.generation import AnswerGenerator, Answering, AnswerText
from ostinato.infra.serving.gateway.answers.messages import (
    ChatHistory,
    arrange,
    history_keys,
    name_session,
    render_messages,
)
from ostinato.infra.serving.gateway.answers.tenant_cache import TenantCache
from ostinato.infra.serving.gateway.answers.tool_forms import ToolForm, form_of
from ostinato.infra.serving.gateway.arms import ArmTable
from ostinato.infra.serving.gateway.config import (
    MAX_CHARACTERS_PER_TOKEN,
    MAX_SESSIONS,
    MAX_TENANT_SESSIONS,
    SESSION_IDLE_SECONDS,
    Caller,
    GatewayConfig,
)
from ostinato.infra.serving.gateway.context import GatewayContext
from ostinato.infra.serving.gateway.failures import (
    CONTEXT_FULL,
    ApiError,
    NeutralValues,
    check_model,
    check_neutral,
)
from ostinato.infra.serving.gateway.recorder import (
    Interaction,
    InteractionRecorder,
    interaction_seed,
    new_interaction_id,
)
from ostinato.infra.serving.gateway.schemas import (
    ChatMessage,
    ChatRequest,
    LikelyToken,
    TokenLogprob,
    ToolDefinition,
    Usage,
)
from ostinato.models.decode.protocol import StopReason
from ostinato.models.decode.requests import MAX_TOP_LOGPROBS
from ostinato.models.rendering import Renderer

CHAT_KIND = "chat"
MAX_STOPS = 4  # as OpenAI's API
_SAMPLING = "only temperature and top_p change the sampling"
_FREE_TEXT = "the model answers in free text"
_TOOLS = "functions are declared in tools, and the model decides which ones it calls"
NEUTRAL_VALUES: NeutralValues = {
    "audio": ((None,), _FREE_TEXT),
    "frequency_penalty": ((None, 0), _SAMPLING),
    "function_call": ((None, "auto", "none"), _TOOLS),
    "functions": ((None, []), _TOOLS),
    "logit_bias": ((None, {}), _SAMPLING),
    "modalities": ((None, ["text"]), _FREE_TEXT),
    "moderation": ((None,), "answers are not moderated"),
    "n": ((None, 1), "each request has one answer"),
    "parallel_tool_calls": ((None, True), _TOOLS),
    "presence_penalty": ((None, 0), _SAMPLING),
    "reasoning_effort": ((None,), "the model's chat template decides whether it thinks"),
    "response_format": ((None, {"type": "text"}), _FREE_TEXT),
    "tool_choice": ((None, "auto", "none"), _TOOLS),
    "verbosity": ((None, "medium"), "only max_tokens limits an answer"),
    "web_search_options": ((None,), "the server does not search"),
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished answer, as a client gets it. `token_ids` include the stop token that ended it."""

    message: ChatMessage
    finish_reason: str
    usage: Usage
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for
    stop_string: str | None = None  # the one that ended the answer, if any


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that has ended, for the records."""

    answering: Answering
    turn: TurnRecord
    key: str | None  # of the history up to this answer; None: the answer's text is incomplete
    latency_seconds: float
    is_abandoned: bool

    @property
    def end_reason(self) -> EndReason:
        """FINISHED also when the client left before the end."""
        whole = (StopReason.STOP_TOKEN, StopReason.STOP_SEQUENCE)
        is_whole = self.answering.stop_reason in whole
        return EndReason.FINISHED if is_whole or self.is_abandoned else EndReason.TOKEN_LIMIT


class ChatSessions(Protocol):
    """Chats that can be continued."""

    def find(self, tenant: str, keys: Sequence[str]) -> tuple[ChatHistory | None, int]:
        """The longest known chat that a request continues, and the number of its messages. `keys`: one history
        key per message of the request.
        """
        ...

    async def keep(self, answered: Answered) -> None:
        """Keeps an answer, also the sampled part of one that its client left, which may be no token."""
        ...


class RecordedChats:
    """Chats of users. Keeps the newest in memory, and records each answer as an interaction."""

    def __init__(self, context: GatewayContext, recorder: InteractionRecorder) -> None:
        self._recorder = recorder
        self._known: TenantCache[ChatHistory] = TenantCache(
            MAX_TENANT_SESSIONS, MAX_SESSIONS, SESSION_IDLE_SECONDS, context.clock
        )

    def find(self, tenant: str, keys: Sequence[str]) -> tuple[ChatHistory | None, int]:
        for place in range(len(keys), 0, -1):
            history = self._known.get(tenant, keys[place - 1])
            if history is not None:
                return history, place
        return None, 0

    async def keep(self, answered: Answered) -> None:
        answering = answered.answering
        if not answering.answer_ids:
            tenant = answering.tenant
            self._recorder.count_unanswered(tenant.name, tenant.account, answering.prompt_tokens)
            return
        if answered.key is not None and answering.stop_reason is StopReason.STOP_TOKEN:
            # other answers end inside the model's turn, so their tokens are not the whole message
            tokens = tuple(answering.builder.token_ids)
            history = ChatHistory(answering.session_id, tokens)
            self._known.put(answering.tenant.name, answered.key, history)
        transcript = Transcript(
            segments=(answering.builder.build(),),
            turns=(answered.turn,),
            end_reason=answered.end_reason,
            final_message=answered.turn.text,
            wall_seconds=answered.latency_seconds,
        )
        interaction = Interaction(
            interaction_id=answering.interaction_id,
            session_id=answering.user_session_id,
            tenant=answering.tenant.name,
            arm=answering.arm,
            problem_kind=CHAT_KIND,
            consent=answering.tenant.consents(answering.request.store),
            account=answering.tenant.account,
            latency_seconds=answered.latency_seconds,
            is_abandoned=answered.is_abandoned,
        )
        await self._recorder.keep(interaction, transcript)


class ChatService:
    """Answers chats on the arms of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        arms: ArmTable,
        renderer: Renderer,
        sessions: ChatSessions,
        clock: Callable[[], float],
    ) -> None:
        self._arms, self._renderer, self._sessions = arms, renderer, sessions
        self._config, self._clock = config, clock
        self._generator = AnswerGenerator(renderer)
        self._form = form_of(config.harness, renderer)

    async def begin(
        self, request: ChatRequest, tenant: Caller, client_session: str | None
    ) -> Answering:
        """Checks a request and renders its prompt. ApiError comes before any generation."""
        _check(request, self._config, self._form)
        request = request.model_copy(update={"messages": arrange(request.messages)})
        tools = request.offered_tools
        owner = (tenant.name, client_session or "")
        consent = tenant.consents(request.store)
        interaction_id = new_interaction_id(consent=consent, tenant=tenant.name)
        earlier, new_messages = self._find_earlier(owner, request)
        session_id = f"chat-{interaction_id}" if earlier is None else earlier.session_id
        user_session_id = name_session(owner) if client_session else session_id
        known = () if earlier is None else earlier.token_ids
        tokens = await self._render(new_messages, tools, known)
        left = self._config.harness.context_tokens - len(tokens)
        if left < 1:
            raise ApiError(
                400,
                f"messages are {len(tokens)} tokens, wanted fewer than "
                f"{self._config.harness.context_tokens}",
                code=CONTEXT_FULL,
                param="messages",
            )
        wanted = request.max_completion_tokens or request.max_tokens
        return Answering(
            request=request,
            tenant=tenant,
            owner=owner,
            interaction_id=interaction_id,
            session_id=session_id,
            user_session_id=user_session_id,
            arm=self._arms.choose(user_session_id),
            builder=SegmentBuilder(
                tokens,
                SamplingDistribution(temperature=request.temperature, top_p=request.top_p),
            ),
            prompt_tokens=len(tokens),
            budget_tokens=min(left, wanted or left),
            seed=request.seed if request.seed is not None else interaction_seed(interaction_id),
            tools=tuple(tool.function.name for tool in tools),
            started=self._clock(),
            text=AnswerText(request.stop or ()),
            is_thought_open=opens_thought(self._renderer, tokens),
            earlier=earlier,
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would have as a new conversation."""
        _check(request, self._config, self._form)
        return len(await self._render(arrange(request.messages), request.offered_tools))

    async def answer(self, answering: Answering) -> Finished:
        """The whole answer at once."""
        # only the text shows a stop string, so slices limit the tokens sampled after one
        ahead_tokens = self._config.stream_slice_tokens if answering.request.stop else None
        async for _ in self._generator.generate(answering, ahead_tokens):
            pass
        return await self._finish(answering)

    async def stream(self, answering: Answering) -> AsyncGenerator[str | Finished, None]:
        """Text as generated, then the finished answer. A possible tool call is held back."""
        shown, has_failed = "", False
        try:
            pieces = self._generator.generate(answering, self._config.stream_slice_tokens)
            async with aclosing(pieces):  # a client that leaves must free the session at once
                async for _ in pieces:
                    text = self._showable(answering)
                    if text != shown and text.startswith(shown):
                        yield text[len(shown) :]
                        shown = text
            finished = await self._finish(answering)
        except OstinatoError:
            has_failed = True
            raise
        finally:
            if not answering.is_recorded and (answering.answer_ids or not has_failed):
                # the client went away: its unfinished answer is still an interaction
                await asyncio.shield(self._record(answering, is_abandoned=True))
        content = finished.message.text
        if content.startswith(shown) and content != shown:
            yield content[len(shown) :]
        yield finished

    async def _finish(self, answering: Answering) -> Finished:
        text = answering.text.text
        message, parsed = ChatMessage(role="assistant", content=text), ParsedAnswer((), text)
        if answering.tools:
            call_prefix = f"call_{answering.interaction_id[-12:]}_"
            offered = (tool.function for tool in answering.request.offered_tools)
            schemas = {function.name: function.parameters or {} for function in offered}
            message, parsed = self._form.read(
                text, schemas, call_prefix, is_opened=answering.is_thought_open
            )
        await self._record(answering, message, parsed)
        return Finished(
            message,
            _finish_reason(answering, message),
            answering.usage,
            prompt_token_ids=tuple(answering.builder.token_ids[: answering.prompt_tokens]),
            token_ids=tuple(answering.answer_ids),
            logprobs=self._logprobs(answering) if answering.request.logprobs else (),
            stop_string=answering.text.stop,
        )

    def _logprobs(self, answering: Answering) -> tuple[TokenLogprob, ...]:
        logprobs_T = answering.builder.build().logprobs_T[answering.prompt_tokens :]
        is_asked = bool(answering.request.top_logprobs)
        likeliest_T = answering.likeliest if is_asked else [()] * len(logprobs_T)
        sampled = zip(answering.answer_ids, logprobs_T, likeliest_T, strict=True)
        return tuple(
            TokenLogprob(
                **self._describe_token(token_id, float(logprob)),
                top_logprobs=[LikelyToken(**self._describe_token(*pair)) for pair in likeliest],
            )
            for token_id, logprob, likeliest in sampled
        )

    def _describe_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._renderer.decode([token_id]),
            "logprob": logprob,
            "bytes": list(self._renderer.token_bytes(token_id)),
        }

    async def _record(
        self,
        answering: Answering,
        message: ChatMessage | None = None,
        parsed: ParsedAnswer | None = None,
        *,
        is_abandoned: bool = False,
    ) -> None:
        """`message`: the answer as the client got it. None: the client got only a part."""
        answering.is_recorded = True
        key = None
        if message is not None and answering.stop_reason is not StopReason.STOP_SEQUENCE:
            history = [*answering.request.messages, message]
            key = self._keys(answering.owner, answering.request, history)[-1]
        calls = parsed.calls if parsed is not None else ()
        records = [
            ToolCallRecord(
                tool=call.tool, arguments=call.arguments, status=call.status, wall_seconds=0.0
            )
            for call in calls
        ]
        turn = TurnRecord(
            generated_tokens=len(answering.answer_ids),
            text=answering.text.text,
            calls=tuple(records),
        )
        latency = self._clock() - answering.started
        await self._sessions.keep(Answered(answering, turn, key, latency, is_abandoned))

    def _find_earlier(
        self, owner: tuple[str, str], request: ChatRequest
    ) -> tuple[ChatHistory | None, list[ChatMessage]]:
        """The longest known conversation that the request continues, and the later messages. None and all
        messages when no conversation is known.
        """
        messages = request.messages
        keys = self._keys(owner, request, messages)
        # an answer that another one follows was not ended there, so its tokens cannot be continued
        is_last = [after.role != "assistant" for after in messages[1:]]
        ends = [key if last else "" for key, last in zip(keys, [*is_last, True], strict=True)]
        earlier, known = self._sessions.find(owner[0], ends)
        return earlier, messages[known:]

    async def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition],
        known: Sequence[int] = (),
    ) -> list[int]:
        try:
            return await asyncio.to_thread(
                render_messages, self._renderer, messages, self._form, tools, known
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error

    def _keys(
        self, owner: tuple[str, str], request: ChatRequest, messages: Sequence[ChatMessage]
    ) -> list[str]:
        return history_keys(owner, messages, self._form.shown_definitions(request.offered_tools))

    def _showable(self, answering: Answering) -> str:
        """Text that later tokens cannot change: no half character, nothing that may become a stop
        string, nothing that may be a call when tools are offered.
        """
        text = answering.text.stable_text
        if not answering.tools:
            return text
        return self._form.showable(text, is_opened=answering.is_thought_open)


def _finish_reason(answering: Answering, message: ChatMessage) -> str:
    """OpenAI's name for the reason why the answer ended."""
    if answering.stop_reason not in (StopReason.STOP_TOKEN, StopReason.STOP_SEQUENCE):
        return "length"
    return "tool_calls" if message.tool_calls else "stop"


def _check_top_logprobs(request: ChatRequest) -> None:
    wanted = request.top_logprobs or 0
    if not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs is {wanted}, wanted 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if wanted and not request.logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {wanted} without logprobs, wanted logprobs true",
            param="logprobs",
        )


def _check(request: ChatRequest, config: GatewayConfig, form: ToolForm) -> None:
    """ApiError for an unsupported request."""
    check_model(request.model, config.model_name)
    tools = request.offered_tools
    check_neutral(request, NEUTRAL_VALUES, has_tools=bool(tools))
    _check_top_logprobs(request)
    stops = request.stop or []
    if len(stops) > MAX_STOPS or not all(stops):
        raise ApiError(
            400,
            f"stop is {stops!r}, wanted 1 to {MAX_STOPS} strings of 1 character or more",
            param="stop",
        )
    form.check(tools)
    num_characters = len(form.shown_definitions(tools)) + sum(
        each.num_characters for each in request.messages
    )
    most = MAX_CHARACTERS_PER_TOKEN * config.harness.context_tokens
    if num_characters > most:
        raise ApiError(
            400,
            f"messages and tools hold {num_characters} characters, wanted at most {most}, since the context "
            f"has {config.harness.context_tokens} tokens",
            code=CONTEXT_FULL,
            param="messages",
        )
