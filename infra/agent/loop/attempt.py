"""The agent loop: one attempt from prompt to transcript.

Failures of the engine, the sandbox or the clock end the attempt with a reason; they do not raise.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ostinato.infra.agent.config import AgentRequest, HarnessConfig, ToolPolicy
from ostinato.infra.agent.dialects.dialect import dialect_of, offered_tools
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.conversation import (
    Conversation,
    ModelAnswer,
    TokenConversation,
    call_reader,
    stated_tools,
)
from ostinato.infra.agent.loop.execute import CallResult, execute_calls
from ostinato.infra.agent.loop.prompts import (
    START_OVER,
    budget_note,
    summary_request,
    write_continuation,
    write_first_message,
    write_system_prompt,
)
from ostinato.infra.agent.tools.calls import ParsedAnswer
from ostinato.infra.agent.tools.definition import Tool
from ostinato.infra.agent.tools.mcp_servers import start_servers
from ostinato.infra.agent.transcript import (
    MODEL_FAULTS,
    CallStatus,
    EndReason,
    Transcript,
    TurnRecord,
)
from ostinato.infra.platform.errors import (
    AgentError,
    EngineError,
    OstinatoError,
    SandboxError,
    SandboxHostLost,
    is_retryable,
)
from ostinato.models.decode.protocol import ModelClient
from ostinato.models.rendering import Renderer

logger = logging.getLogger(__name__)
SUMMARY_MARGIN_TOKENS = 96  # the request for a summary and its header
OnTurn = Callable[[TurnRecord], Awaitable[None]]
Ending = tuple[EndReason, str]


class Dialogue(Protocol):
    """One attempt's dialogue in tokens, from an opened engine to the transcript."""

    async def __call__(
        self,
        model: ModelClient,
        renderer: Renderer,
        request: AgentRequest,
        config: HarnessConfig,
        *,
        clock: Callable[[], float],
        on_turn: OnTurn | None,
    ) -> Transcript: ...


async def run_agent(
    model: ModelClient,
    renderer: Renderer,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_turn: OnTurn | None = None,
) -> Transcript:
    """Runs the attempt to its end."""
    if environment.dialogue is not None:
        dialogue = environment.dialogue
        return await dialogue(model, renderer, request, config, clock=clock, on_turn=on_turn)
    await start_servers(environment, config)
    conversation = open_conversation(model, renderer, environment, request, config)
    earlier = () if request.opening is None else request.opening.turns
    try:
        return await run_conversation(
            conversation,
            environment,
            request.prompt,
            config,
            clock=clock,
            on_turn=on_turn,
            earlier=earlier,
        )
    finally:
        await conversation.close()


def open_conversation(
    model: ModelClient,
    renderer: Renderer,
    environment: AgentEnvironment,
    request: AgentRequest,
    config: HarnessConfig,
) -> TokenConversation:
    """The attempt's conversation in tokens, opened with the dialect's prompts."""
    policy = environment.policy_under(config)
    tools = offered_tools(config, policy, environment.tools)
    stated = stated_tools(renderer, config, tools)
    system, prompt = first_messages(request, config, tools, policy, states_tools=bool(stated))
    return TokenConversation(
        model,
        renderer,
        request,
        call_reader(config, policy, environment.tools),
        prompt=prompt,
        system_prompt=system,
        tools=stated,
        is_published=dialect_of(config).is_published,
    )


def first_messages(
    request: AgentRequest,
    config: HarnessConfig,
    tools: Mapping[str, Tool],
    policy: ToolPolicy,
    *,
    states_tools: bool,
) -> tuple[str | None, str]:
    """System message, if any, and the user's first message, in the dialect's words. `states_tools`: the chat
    template or the server states the tools.
    """
    if not dialect_of(config).is_explained:
        return request.system_prompt, request.prompt
    system = request.system_prompt
    if system is None:
        system = write_system_prompt(
            tools.values(), config, policy, request.facts, states_tools=states_tools
        )
    return system, write_first_message(request.prompt, request.facts, config)


async def run_conversation(
    conversation: Conversation,
    environment: AgentEnvironment,
    prompt: str,
    config: HarnessConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_turn: OnTurn | None = None,
    earlier: Sequence[TurnRecord] = (),
) -> Transcript:
    """Takes turns until something ends the attempt. `prompt`: the request, repeated in a segment after
    a summary; the conversation already holds it. `on_turn`: called with each completed turn.
    `earlier`: turns that the conversation begins with; they count towards the limits.
    """
    started = clock()
    attempt = _Attempt(conversation, environment, prompt, config, on_turn, list(earlier))
    attempt.generated_tokens = sum(turn.generated_tokens for turn in earlier)
    end_reason, detail = await run_to_end(
        attempt.run(), config, lambda: environment.sandbox.is_lost
    )
    return Transcript(
        segments=conversation.segments(),
        turns=tuple(attempt.turns),
        end_reason=end_reason,
        final_message=attempt.final_message,
        detail=detail,
        wall_seconds=clock() - started,
    )


async def run_to_end(
    attempt: Awaitable[Ending],
    config: HarnessConfig,
    is_box_lost: Callable[[], bool] = lambda: False,
) -> Ending:
    """Awaits a dialogue within the time limit of an attempt. Returns the reason of its end, also for errors."""
    try:
        async with asyncio.timeout(config.attempt_time_limit_seconds):
            return await attempt
    except TimeoutError:
        limit = f"{config.attempt_time_limit_seconds:g} seconds"
        return EndReason.TIMED_OUT, f"attempt ran longer than {limit}"
    except EngineError as error:
        return EndReason.ENGINE_FAILED, str(error)
    except (SandboxError, AgentError) as error:
        # SandboxHostLost comes from the test server, which many attempts share, not from this attempt's box
        if is_box_lost() and not isinstance(error, SandboxHostLost):
            return EndReason.BOX_RUINED, str(error)
        return EndReason.SANDBOX_FAILED, str(error)
    except OstinatoError as error:
        if not is_retryable(error):
            raise
        return EndReason.SANDBOX_FAILED, f"{type(error).__name__}: {error}"
    except Exception as error:
        logger.exception("unexpected error in a dialogue")
        return EndReason.FAULT, f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class _Attempt:
    """The running state of one attempt."""

    conversation: Conversation
    environment: AgentEnvironment
    prompt: str
    config: HarnessConfig
    on_turn: OnTurn | None
    turns: list[TurnRecord] = field(default_factory=list)
    final_message: str = ""
    generated_tokens: int = 0
    broken_turns: int = 0
    num_summaries: int = 0
    num_restarts: int = 0

    async def run(self) -> Ending:
        """Takes turns until something ends the attempt. Returns the reason and its detail."""
        while True:
            answer = await self._answer()
            if answer is None:
                return EndReason.TOKEN_LIMIT, ""
            if not answer.is_whole:
                await self._record(answer, [])
                return EndReason.TOKEN_LIMIT, f"answer cut: {answer.cut_reason}"
            results = await self._execute(answer.parsed) if answer.parsed.calls else []
            starts_over = self._starts_over(answer)
            await self._record(answer, results, is_summary=starts_over)
            if not answer.parsed.calls and not starts_over:
                self.final_message = answer.parsed.prose
                return EndReason.FINISHED, ""
            ending = self._check_progress()
            if ending is not None:
                return ending
            if starts_over:
                await self._start_over(answer)
                continue
            self._show_results(results)
            ending = await self._summarise_if_due()
            if ending is not None:
                return ending

    async def _answer(self, limit_tokens: int | None = None) -> ModelAnswer | None:
        """The next answer. None when no token may be sampled any more."""
        context_left = self.config.context_tokens - self.conversation.num_tokens
        if limit_tokens is None:
            context_left -= self._reserve_tokens()
        budget = min(context_left, self.config.max_generated_tokens - self.generated_tokens)
        if budget <= 0:
            return None
        answer = await self.conversation.answer(min(budget, limit_tokens or budget))
        self.generated_tokens += answer.generated_tokens
        return answer

    def _reserve_tokens(self) -> int:
        """Context kept free so that a summary can always be asked for and written."""
        config = self.config
        if config.summarise_at_tokens is None or self.num_summaries >= config.max_summaries:
            return 0
        if config.summary_limit_tokens is None:
            return 0
        return config.summary_limit_tokens + SUMMARY_MARGIN_TOKENS

    def _show_results(self, results: list[CallResult]) -> None:
        """Shows the results, and the rest of the budgets once little is left."""
        config = self.config
        note, room = None, None
        if config.announce_turns or config.announce_tokens:
            left = config.max_generated_tokens - self.generated_tokens
            note = budget_note(config, config.max_turns - len(self.turns), left)
        if config.summarise_at_tokens is not None:
            room = config.context_tokens - self.conversation.num_tokens - self._reserve_tokens()
        if results:
            self.conversation.append_results([result.text for result in results], note, room)

    async def _execute(self, answer: ParsedAnswer) -> list[CallResult]:
        limit = self.config.max_calls_per_turn
        refused = [
            replace(
                call,
                status=CallStatus.INVALID_ARGUMENTS,
                error=f"more than {limit} calls in a turn",
            )
            for call in answer.calls[limit:]
        ]
        return await execute_calls(
            [*answer.calls[:limit], *refused],
            self.environment,
            self.config,
            turn=len(self.turns) + 1,
        )

    async def _record(
        self,
        answer: ModelAnswer,
        results: list[CallResult],
        *,
        is_summary: bool = False,
    ) -> None:
        turn = TurnRecord(
            generated_tokens=answer.generated_tokens,
            text=answer.text.strip() if is_summary else answer.text,
            calls=tuple(result.record for result in results),
            results=tuple(result.text for result in results),
            is_summary=is_summary,
            begins_in_thought=answer.begins_in_thought,
        )
        self.turns.append(turn)
        if self.on_turn is not None:
            await self.on_turn(turn)

    def _check_progress(self) -> Ending | None:
        """The end of an attempt that only breaks calls, repeats itself or has no turns left, else None."""
        turn = self.turns[-1]
        is_broken = bool(turn.calls) and all(call.status in MODEL_FAULTS for call in turn.calls)
        self.broken_turns = self.broken_turns + 1 if is_broken else 0
        if self.broken_turns >= self.config.max_broken_turns:
            return EndReason.BROKEN_CALLS, f"{self.broken_turns} turns of broken calls in a row"
        if len(self.turns) > 1 and turn.calls:
            previous = self.turns[-2]
            if turn.text == previous.text and _same_results(turn, previous):
                return EndReason.BROKEN_CALLS, "the same turn twice with the same results"
        if len(self.turns) >= self.config.max_turns:
            return EndReason.TURN_LIMIT, ""
        return None

    def _starts_over(self, answer: ModelAnswer) -> bool:
        """Whether the model asks to start over and may still do so."""
        if answer.parsed.calls or self.num_restarts >= self.config.max_restarts:
            return False
        return answer.text.lstrip().startswith(START_OVER)

    async def _start_over(self, answer: ModelAnswer) -> None:
        """Begins the next segment with the request and the model's note to itself."""
        self.num_restarts += 1
        await self.environment.restore_files()
        await self.conversation.restart(
            write_continuation(
                self.prompt,
                answer.text.strip(),
                self.environment.state,
                self.num_summaries + self.num_restarts,
                self.config,
            )
        )

    async def _summarise_if_due(self) -> Ending | None:
        """Past the trigger, the model writes a summary and the next segment starts from it.

        Three limits bound summaries: max_summaries, max_turns (a summary is a turn) and max_generated_tokens.
        """
        config = self.config
        trigger = config.summarise_at_tokens
        if trigger is None or self.conversation.num_tokens < trigger:
            return None
        if self.num_summaries >= config.max_summaries:
            return None
        self.conversation.append_user(summary_request(config))
        limit = config.summary_limit_tokens
        answer = await self._answer(limit or config.context_tokens)
        if answer is None:
            return EndReason.TOKEN_LIMIT, "no room for a summary"
        await self._record(answer, [], is_summary=True)
        is_long = limit is not None and answer.generated_tokens >= limit
        if not answer.is_whole and not is_long:
            return EndReason.TOKEN_LIMIT, f"summary cut: {answer.cut_reason}"
        self.num_summaries += 1
        state = self.environment.state
        await self.conversation.restart(
            write_continuation(self.prompt, answer.text.strip(), state, self.num_summaries, config)
        )
        return None


def _same_results(turn: TurnRecord, previous: TurnRecord) -> bool:
    """Whether two turns read the same. The ids in front of results do not count."""

    def bodies(record: TurnRecord) -> list[str]:
        return [
            result.partition("\n")[2] if call.call_id else result
            for call, result in zip(record.calls, record.results, strict=True)
        ]

    return bodies(turn) == bodies(previous)
