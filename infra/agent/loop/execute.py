"""Runs the calls of one turn.

A call waits for the earlier calls that it conflicts with (one writes a resource that the other touches) and otherwise
runs at the same time. There is exactly one result per call, in call order, whatever fails. A mistake of the model
becomes a result that it reads. An infrastructure failure is retried and then raised, after the other calls have ended:
such an attempt is masked in training, not punished.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.places import LISTING_TOOLS, follow_place, tag_places
from ostinato.infra.agent.dialects.dialect import catalogue_of, dialect_of
from ostinato.infra.agent.dialects.edits.functions import place_edits
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolRefusal, ToolTimeout
from ostinato.infra.agent.regions import RegionError
from ostinato.infra.agent.tools.calls import ParsedCall
from ostinato.infra.agent.tools.definition import Output, Tool, covers, resources
from ostinato.infra.agent.tools.limits import cut_lines, cut_middle, share_out
from ostinato.infra.agent.tools.names import ASK_USER, RUN_TERMINAL
from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord
from ostinato.infra.platform.errors import (
    AgentError,
    OstinatoError,
    SandboxError,
    SandboxLost,
    boundary,
    is_retryable,
)

TERMINAL_MARGIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CallResult:
    """Text for the model and record of one call."""

    text: str
    record: ToolCallRecord


@dataclass(frozen=True, slots=True)
class _Ran:
    """Outcome of one executed call. `failure` is set for an infrastructure fault."""

    status: CallStatus
    output: Output
    wall_seconds: float = 0.0
    failure: OstinatoError | None = None


async def execute_calls(
    calls: Sequence[ParsedCall],
    environment: AgentEnvironment,
    config: HarnessConfig,
    *,
    turn: int = 1,
) -> list[CallResult]:
    """One result per call, in call order.

    Raises the first infrastructure failure (SandboxLost, AgentError ...) that remains after retries.
    """
    calls = _with_ids(calls, turn) if dialect_of(config).is_explained else calls
    if config.edits != "tool":
        calls = await place_edits(calls, environment, config)
    if config.place_tags:  # before any call runs: a tag refers to results that the model has read
        calls = [await follow_place(call, environment) for call in calls]
    tools = {**catalogue_of(config), **environment.tools}
    touched = [_touched(call, tools) for call in calls]
    tasks: list[asyncio.Task[_Ran]] = []
    async with asyncio.TaskGroup() as group:
        for index, call in enumerate(calls):
            earlier = [tasks[j] for j in range(index) if _conflict(touched[j], touched[index])]
            tasks.append(group.create_task(_run_call(call, tools, environment, config, earlier)))
    done = [task.result() for task in tasks]
    for ran in done:
        if ran.failure is not None:
            raise ran.failure
    texts = _word_results(calls, done, environment, config)
    return [
        CallResult(text, _record(call, ran))
        for call, ran, text in zip(calls, done, texts, strict=True)
    ]


def _with_ids(calls: Sequence[ParsedCall], turn: int) -> list[ParsedCall]:
    """The calls, each with an id. A call that repeats an id of the turn is InvalidArguments."""
    given: set[str] = set()
    named: list[ParsedCall] = []
    for index, call in enumerate(calls, start=1):
        call = replace(call, call_id=call.call_id or f"{turn}.{index}")
        if call.call_id in given:
            error = f"call id {call.call_id[:60]} is used twice in a turn"
            call = replace(call, status=CallStatus.INVALID_ARGUMENTS, error=error)
        given.add(call.call_id)
        named.append(call)
    return named


def _word_results(
    calls: Sequence[ParsedCall],
    done: Sequence[_Ran],
    environment: AgentEnvironment,
    config: HarnessConfig,
) -> list[str]:
    """The results as the model reads them, each under its own limit and all under the turn's."""
    texts = [ran.output if isinstance(ran.output, str) else ran.output() for ran in done]
    texts = [
        f"{call.note}\n{text}" if call.note else text
        for call, text in zip(calls, texts, strict=True)
    ]
    if config.place_tags:
        for index, call in enumerate(calls):
            if call.tool in LISTING_TOOLS:
                texts[index], places = tag_places(texts[index])
                environment.state.places = places or environment.state.places
    limits = [config.result_limit_characters] * len(texts)
    if config.turn_limit_characters is not None:
        lengths = [min(len(text), config.result_limit_characters) for text in texts]
        limits = share_out(config.turn_limit_characters, lengths)
    if not dialect_of(config).is_explained:
        return [cut_middle(text, limit) for text, limit in zip(texts, limits, strict=True)]
    return [
        f"[{_title(call, ran)}]\n{cut_lines(text, limit)}"
        for call, ran, text, limit in zip(calls, done, texts, limits, strict=True)
    ]


def _title(call: ParsedCall, ran: _Ran) -> str:
    """Title of a result: the call's id, tool and status."""
    return " ".join(filter(None, (call.call_id, call.tool or "call", ran.status)))


def _record(call: ParsedCall, ran: _Ran) -> ToolCallRecord:
    return ToolCallRecord(
        tool=call.tool,
        arguments=call.arguments,
        status=ran.status,
        wall_seconds=ran.wall_seconds,
        call_id=call.call_id,
    )


Touched = tuple[frozenset[str], frozenset[str]]


def _touched(call: ParsedCall, tools: Mapping[str, Tool]) -> Touched:
    if call.status is not CallStatus.OK:
        return frozenset(), frozenset()
    return resources(tools[call.tool], call.arguments)


def _conflict(first: Touched, second: Touched) -> bool:
    return (
        _overlap(first[1], second[0])
        or _overlap(first[1], second[1])
        or _overlap(first[0], second[1])
    )


def _overlap(ours: frozenset[str], theirs: frozenset[str]) -> bool:
    return any(covers(mine, other) for mine in ours for other in theirs)


async def _run_call(
    call: ParsedCall,
    tools: Mapping[str, Tool],
    environment: AgentEnvironment,
    config: HarnessConfig,
    earlier: Sequence[asyncio.Task[_Ran]],
) -> _Ran:
    if earlier:
        await asyncio.wait(earlier)
    if call.status is not CallStatus.OK:
        return _Ran(call.status, f"error: {call.error}")
    started = time.perf_counter()
    ran = await _run_tool(call, tools[call.tool], environment, config)
    return replace(ran, wall_seconds=time.perf_counter() - started)


async def _run_tool(
    call: ParsedCall, tool: Tool, environment: AgentEnvironment, config: HarnessConfig
) -> _Ran:
    """The call's outcome. Whatever it raises becomes a status or an infrastructure failure."""
    limit_seconds = _limit_seconds(call, environment, config)
    try:
        with boundary(AgentError, f"tool {call.tool}"):
            async with asyncio.timeout(limit_seconds):
                return await _try_tool(call, tool, environment, config)
    except OstinatoError as error:
        if isinstance(error.__cause__, TimeoutError):
            limit = f"{limit_seconds:g} seconds"
            return _Ran(CallStatus.TIMEOUT, f"error: {call.tool} ran longer than {limit}")
        if is_retryable(error) or not isinstance(error, SandboxError):
            return _Ran(CallStatus.ENVIRONMENT, "", failure=error)
        return _Ran(CallStatus.ENVIRONMENT, f"error: {error}")


async def _try_tool(
    call: ParsedCall, tool: Tool, environment: AgentEnvironment, config: HarnessConfig
) -> _Ran:
    """Runs the tool. Mistakes of the model are a status. Infrastructure faults are retried."""
    retrying = AsyncRetrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(1 + config.infrastructure_retries),
        reraise=True,
    )
    try:
        return _Ran(CallStatus.OK, await retrying(tool.run, environment, call.values, config))
    except (RegionError, ToolRefusal) as error:
        return _Ran(CallStatus.INVALID_ARGUMENTS, f"error: {error}")
    except ToolFailure as error:
        return _Ran(CallStatus.ENVIRONMENT, f"error: {error}")
    except ToolTimeout as error:
        return _Ran(CallStatus.TIMEOUT, f"error: {error}")


def _may_pass(error: BaseException) -> bool:
    """Whether a retry may help. A lost sandbox does not come back."""
    return is_retryable(error) and not isinstance(error, SandboxLost)


def _limit_seconds(call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig) -> float:
    """Time limit of a call. The full dialect's terminal gets a margin, because it ends its command itself to keep
    the output.
    """
    if call.tool == ASK_USER and environment.ask_limit_seconds is not None:
        return environment.ask_limit_seconds
    margin = TERMINAL_MARGIN_SECONDS if call.tool == RUN_TERMINAL else 0.0
    return config.call_time_limit_seconds + (margin if dialect_of(config).is_explained else 0.0)
