"""The agent loop: one attempt from prompt to transcript.

Owns `run_agent`. A model client, the renderer, an environment, a request and limits in; a
`Transcript` out. Tokens in, tokens out: what the model sampled is appended as sampled, the template
only appends around it. Failures of the engine, the sandbox or the clock end the attempt with a
reason; they do not raise. It grades nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from infra.errors import EngineError, SandboxError
from infra.harness.config import AgentRequest, HarnessConfig
from infra.harness.environment import AgentEnvironment
from infra.harness.execute import CallResult, execute_calls
from infra.harness.parse import ParsedAnswer, ParsedCall, parse_answer
from infra.harness.segments import SegmentBuilder
from infra.harness.transcript import CallStatus, EndReason, Segment, Transcript, TurnRecord
from models.decode.protocol import GenerateRequest, Generation, ModelClient, StopReason
from models.rendering import Renderer

SUMMARY_REQUEST = "Summarise what was done and what remains."
MODEL_FAULTS = (CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS)
OnTurn = Callable[[TurnRecord], Awaitable[None]]


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
    """Runs the attempt to its end. `on_turn` hears of each turn as it completes."""
    started = clock()
    attempt = _Attempt(model, renderer, environment, request, config, on_turn)
    detail = ""
    try:
        async with asyncio.timeout(config.attempt_time_limit_seconds):
            end_reason, detail = await attempt.run()
    except TimeoutError:
        end_reason = EndReason.TIMED_OUT
        detail = f"attempt ran longer than {config.attempt_time_limit_seconds:g} seconds"
    except EngineError as error:
        end_reason, detail = EndReason.ENGINE_FAILED, str(error)
    except SandboxError as error:
        end_reason, detail = EndReason.SANDBOX_FAILED, str(error)
    finally:
        await model.end_session(attempt.session_id)
    return Transcript(
        segments=(*attempt.finished_segments, attempt.builder.build()),
        turns=tuple(attempt.turns),
        end_reason=end_reason,
        final_message=attempt.final_message,
        detail=detail,
        wall_seconds=clock() - started,
    )


@dataclass(slots=True)
class _Attempt:
    """The running state of one attempt."""

    model: ModelClient
    renderer: Renderer
    environment: AgentEnvironment
    request: AgentRequest
    config: HarnessConfig
    on_turn: OnTurn | None
    builder: SegmentBuilder = field(init=False)
    finished_segments: list[Segment] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    final_message: str = ""
    generated_tokens: int = 0
    broken_turns: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        request = self.request
        if request.earlier_token_ids:
            prompt = [*request.earlier_token_ids, *self.renderer.append_user(request.prompt)]
        else:
            prompt = self.renderer.start(request.prompt, request.system_prompt)
        self.builder = SegmentBuilder(prompt)

    @property
    def session_id(self) -> str:
        """Each segment is a conversation of its own to the engine."""
        suffix = f"#{len(self.finished_segments)}" if self.finished_segments else ""
        return self.request.session_id + suffix

    async def run(self) -> tuple[EndReason, str]:
        """Takes turns until something ends the attempt; the reason and its detail."""
        while True:
            generation = await self._generate()
            if generation is None:
                return EndReason.TOKEN_LIMIT, ""
            text = self._answer_text(generation)
            if generation.stop_reason is StopReason.CANCELLED:
                raise EngineError(f"generation {generation.request_id} was cancelled")
            if generation.stop_reason is not StopReason.STOP_TOKEN:
                await self._record(generation, text, [])
                return EndReason.TOKEN_LIMIT, f"answer cut: {generation.stop_reason}"
            answer = parse_answer(text, self.config.tools)
            if not answer.calls:
                self.final_message = answer.prose
                await self._record(generation, text, [])
                return EndReason.FINISHED, ""
            results = await self._execute(answer)
            await self._record(generation, text, results)
            ending = self._check_progress()
            if ending is not None:
                return ending
            self.builder.append_unsampled(
                self.renderer.append_results([result.text for result in results])
            )
            await self._summarise_if_due()

    async def _generate(self) -> Generation | None:
        """The next answer; None when no token may be sampled any more."""
        context_left = self.config.context_tokens - len(self.builder.token_ids)
        budget = min(context_left, self.config.max_generated_tokens - self.generated_tokens)
        if budget <= 0:
            return None
        request = self.request
        generation = await self.model.generate(
            GenerateRequest(
                request_id=f"{request.session_id}/{self.num_requests}",
                session_id=self.session_id,
                token_ids=tuple(self.builder.token_ids),
                max_new_tokens=budget,
                stop_token_ids=self.renderer.stop_token_ids,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed + self.num_requests,
                priority=request.priority,
                return_routes=request.return_routes,
            )
        )
        self.num_requests += 1
        self.generated_tokens += len(generation.token_ids)
        self.builder.append_generation(generation)
        return generation

    def _answer_text(self, generation: Generation) -> str:
        ids = generation.token_ids
        if ids and ids[-1] in self.renderer.stop_token_ids:
            ids = ids[:-1]
        return self.renderer.decode(ids)

    async def _execute(self, answer: ParsedAnswer) -> list[CallResult]:
        limit = self.config.max_calls_per_turn
        refused = [
            ParsedCall(
                call.tool,
                call.arguments,
                CallStatus.INVALID_ARGUMENTS,
                f"more than {limit} calls in a turn",
            )
            for call in answer.calls[limit:]
        ]
        return await execute_calls([*answer.calls[:limit], *refused], self.environment, self.config)

    async def _record(self, generation: Generation, text: str, results: list[CallResult]) -> None:
        turn = TurnRecord(
            generated_tokens=len(generation.token_ids),
            text=text,
            calls=tuple(result.record for result in results),
            results=tuple(result.text for result in results),
        )
        self.turns.append(turn)
        if self.on_turn is not None:
            await self.on_turn(turn)

    def _check_progress(self) -> tuple[EndReason, str] | None:
        """Ends attempts that only break calls, repeat themselves or are out of turns."""
        turn = self.turns[-1]
        is_broken = all(call.status in MODEL_FAULTS for call in turn.calls)
        self.broken_turns = self.broken_turns + 1 if is_broken else 0
        if self.broken_turns >= self.config.max_broken_turns:
            return EndReason.BROKEN_CALLS, f"{self.broken_turns} turns of broken calls in a row"
        if len(self.turns) > 1:
            previous = self.turns[-2]
            if turn.text == previous.text and turn.results == previous.results:
                return EndReason.BROKEN_CALLS, "the same turn twice with the same results"
        if len(self.turns) >= self.config.max_turns:
            return EndReason.TURN_LIMIT, ""
        return None

    async def _summarise_if_due(self) -> None:
        """Past the trigger, the model writes a summary and the next segment starts from it."""
        trigger = self.config.summarise_at_tokens
        if trigger is None or len(self.builder.token_ids) < trigger:
            return
        if len(self.finished_segments) >= self.config.max_summaries:
            return
        self.builder.drop_answer_header()  # no engine has seen it yet
        self.builder.append_unsampled(self.renderer.append_user(SUMMARY_REQUEST))
        generation = await self._generate()
        if generation is None or generation.stop_reason is not StopReason.STOP_TOKEN:
            return
        summary = self._answer_text(generation).strip()
        await self._record(generation, summary, [])
        old_session_id = self.session_id
        self.finished_segments.append(self.builder.build())
        await self.model.end_session(old_session_id)
        prompt = f"{self.request.prompt}\n\n{summary}"
        self.builder = SegmentBuilder(self.renderer.start(prompt, self.request.system_prompt))
