"""Chat completions: one answer of the model to a client that runs the tools itself."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

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
from ostinato.infra.serving.gateway.answers.generation import AnswerGenerator, Answering, AnswerText
from ostinato.infra.serving.gateway.answers.messages import (
    ChatHistory,
    arrange,
    history_key,
    render_messages,
)
from ostinato.infra.serving.gateway.answers.tenant_cache import TenantCache
from ostinato.infra.serving.gateway.answers.tool_forms import ToolForm, form_of
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
from ostinato.models.decode.requests import MOST_TOP_LOGPROBS

CHAT_KIND = "chat"
MAX_STOPS = 4  # as OpenAI's API
_SAMPLING = "temperature and top_p alone shape what is sampled"
_FREE_TEXT = "the model answers in free text"
_TOOLS = "functions are declared in tools, and the model decides what it calls"
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
    "reasoning_effort": ((None,), "the model thinks as its chat template has it"),
    "response_format": ((None, {"type": "text"}), _FREE_TEXT),
    "tool_choice": ((None, "auto", "none"), _TOOLS),
    "verbosity": ((None, "medium"), "max_tokens bounds an answer"),
    "web_search_options": ((None,), "nothing is searched"),
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
    stop_string: str | None = None  # of the request's, where one ended the answer


class ChatService:
    """Answers chats on the arms of one gateway."""

    def __init__(self, context: GatewayContext, recorder: InteractionRecorder) -> None:
        self._arms, self._renderer, self._recorder = context.arms, context.renderer, recorder
        self._config, self._clock = context.config, context.clock
        self._conversations: TenantCache[ChatHistory] = TenantCache(
            MAX_TENANT_SESSIONS, MAX_SESSIONS, SESSION_IDLE_SECONDS, context.clock
        )
        self._generator = AnswerGenerator(context.renderer)
        self._form = form_of(context.config.harness, context.renderer)

    async def begin(
        self, request: ChatRequest, tenant: Caller, client_session: str | None
    ) -> Answering:
        """Checks a request and lays out its tokens. ApiError comes before any generation."""
        _check(request, self._config, self._form)
        request = request.model_copy(update={"messages": arrange(request.messages)})
        tools = request.offered_tools
        owner = (tenant.name, client_session or "")
        consent = tenant.consents(request.store)
        interaction_id = new_interaction_id(consent=consent, tenant=tenant.name)
        earlier, new_messages = self._continued(owner, request)
        session_id = f"chat-{interaction_id}" if earlier is None else earlier.session_id
        known = () if earlier is None else earlier.token_ids
        tokens = await self._render(new_messages, tools, known)
        left = self._config.harness.context_tokens - len(tokens)
        if left < 1:
            raise ApiError(
                400,
                f"messages are {len(tokens)} tokens, wanted fewer than "
                f"{self._config.harness.context_tokens}",
                code="context_length_exceeded",
                param="messages",
            )
        wanted = request.max_completion_tokens or request.max_tokens
        return Answering(
            request=request,
            tenant=tenant,
            owner=owner,
            interaction_id=interaction_id,
            session_id=session_id,
            arm=self._arms.choose(session_id),
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
        )

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would have as a new conversation."""
        _check(request, self._config, self._form)
        return len(await self._render(arrange(request.messages), request.offered_tools))

    async def answer(self, answering: Answering) -> Finished:
        """The whole answer at once."""
        # nothing is sampled far beyond a stop string that only the text can show
        ahead_tokens = self._config.stream_slice_tokens if answering.request.stop else None
        async for _ in self._generator.generate(answering, ahead_tokens):
            pass
        return await self._finish(answering)

    async def stream(self, answering: Answering) -> AsyncGenerator[str | Finished, None]:
        """Text as generated, then the finished answer. A possible tool call is held back."""
        shown = ""
        try:
            pieces = self._generator.generate(answering, self._config.stream_slice_tokens)
            async with aclosing(pieces):  # a client that leaves must free the session at once
                async for _ in pieces:
                    text = self._showable(answering)
                    if text != shown and text.startswith(shown):
                        yield text[len(shown) :]
                        shown = text
            finished = await self._finish(answering)
        finally:
            if not answering.is_recorded and answering.answer_ids:
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
            message, parsed = self._form.read(
                text, answering.tools, call_prefix, is_opened=answering.is_thought_open
            )
        finish_reason = _finish_reason(answering, message)
        if answering.stop_reason is StopReason.STOP_TOKEN:
            # other answers end inside the model's turn: their tokens are not the whole message
            history = [*answering.request.messages, message]
            key = self._key(answering.owner, answering.request, history)
            tokens = tuple(answering.builder.token_ids)
            self._conversations.put(
                answering.tenant.name, key, ChatHistory(answering.session_id, tokens)
            )
        await self._record(answering, parsed=parsed)
        return self._finished(answering, message, finish_reason)

    def _finished(self, answering: Answering, message: ChatMessage, finish_reason: str) -> Finished:
        prompt_tokens = answering.prompt_tokens
        return Finished(
            message,
            finish_reason,
            answering.usage,
            prompt_token_ids=tuple(answering.builder.token_ids[:prompt_tokens]),
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
                **self._stated(token_id, float(logprob)),
                top_logprobs=[LikelyToken(**self._stated(*pair)) for pair in likeliest],
            )
            for token_id, logprob, likeliest in sampled
        )

    def _stated(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._renderer.token_bytes(token_id)
        return {
            "token": self._renderer.decode([token_id]),
            "logprob": logprob,
            "bytes": list(spelled),
        }

    async def _record(
        self,
        answering: Answering,
        *,
        parsed: ParsedAnswer | None = None,
        is_abandoned: bool = False,
    ) -> None:
        answering.is_recorded = True
        latency = self._clock() - answering.started
        text = answering.text.text
        calls = parsed.calls if parsed is not None else ()
        records = [
            ToolCallRecord(
                tool=call.tool, arguments=call.arguments, status=call.status, wall_seconds=0.0
            )
            for call in calls
        ]
        turn = TurnRecord(
            generated_tokens=len(answering.answer_ids), text=text, calls=tuple(records)
        )
        is_whole = answering.stop_reason in (StopReason.STOP_TOKEN, StopReason.STOP_SEQUENCE)
        transcript = Transcript(
            segments=(answering.builder.build(),),
            turns=(turn,),
            end_reason=EndReason.FINISHED if is_whole or is_abandoned else EndReason.TOKEN_LIMIT,
            final_message=text,
            wall_seconds=latency,
        )
        interaction = Interaction(
            interaction_id=answering.interaction_id,
            session_id=answering.session_id,
            tenant=answering.tenant.name,
            arm=answering.arm,
            problem_kind=CHAT_KIND,
            consent=answering.tenant.consents(answering.request.store),
            account=answering.tenant.account,
            latency_seconds=latency,
            is_abandoned=is_abandoned,
        )
        await self._recorder.keep(interaction, transcript)

    def _continued(
        self, owner: tuple[str, str], request: ChatRequest
    ) -> tuple[ChatHistory | None, list[ChatMessage]]:
        """The known conversation up to the last assistant message, and the messages since. None, and all
        messages, where it is not known.
        """
        messages = request.messages
        last = max(
            (index for index, message in enumerate(messages) if message.role == "assistant"),
            default=-1,
        )
        if last < 0:
            return None, messages
        key = self._key(owner, request, messages[: last + 1])
        earlier = self._conversations.get(owner[0], key)
        return earlier, messages if earlier is None else messages[last + 1 :]

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

    def _key(self, owner: tuple[str, str], request: ChatRequest, history: list[ChatMessage]) -> str:
        return history_key(owner, history, self._form.stated(request.offered_tools))

    def _showable(self, answering: Answering) -> str:
        """Text that later tokens cannot change: no half character, nothing that may become a stop
        string, nothing that may be a call when tools are offered.
        """
        text = answering.text.stable_text
        if not answering.tools:
            return text
        return self._form.showable(text, is_opened=answering.is_thought_open)


def _finish_reason(answering: Answering, message: ChatMessage) -> str:
    """Reason for the end of the answer, in OpenAI's words."""
    if answering.stop_reason not in (StopReason.STOP_TOKEN, StopReason.STOP_SEQUENCE):
        return "length"
    return "tool_calls" if message.tool_calls else "stop"


def _check_top_logprobs(request: ChatRequest) -> None:
    wanted = request.top_logprobs or 0
    if not 0 <= wanted <= MOST_TOP_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs is {wanted}, wanted 0 to {MOST_TOP_LOGPROBS}", param="top_logprobs"
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
    num_characters = len(form.stated(tools)) + sum(said.num_characters for said in request.messages)
    most = MAX_CHARACTERS_PER_TOKEN * config.harness.context_tokens
    if num_characters > most:
        raise ApiError(
            400,
            f"messages and tools hold {num_characters} characters, wanted at most {most}, which would be "
            f"{config.harness.context_tokens} of the longest tokens",
            code="context_length_exceeded",
            param="messages",
        )
