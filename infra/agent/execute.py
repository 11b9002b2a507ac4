"""Runs the calls of one turn.

The order: a call waits for the earlier calls it conflicts with (one writes what the other touches)
and otherwise runs beside them; there is exactly one result per call, in call order, whatever fails.
What the model did wrong is a result it reads. What we did wrong is tried again and then raised,
after the other calls have ended: the attempt is masked, not punished. Parsed calls in, results out.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from ostinato.infra.agent import full_file_tools, full_search_tools
from ostinato.infra.agent.catalogues import CATALOGUES
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.definitions import covers, resources
from ostinato.infra.agent.environment import AgentEnvironment, ToolFailure, ToolRefusal, ToolTimeout
from ostinato.infra.agent.file_tools import edit_file, list_dir, read_file, read_lints, write_file
from ostinato.infra.agent.other_tools import (
    ask_user,
    codebase_search,
    grep,
    run_terminal,
    todo_write,
)
from ostinato.infra.agent.parse import ParsedCall
from ostinato.infra.agent.places import LISTING_TOOLS, follow_place, tag_places
from ostinato.infra.agent.regions import RegionError
from ostinato.infra.agent.report import cut_lines, cut_middle, share_out
from ostinato.infra.agent.terminal_tools import run_terminal as run_full_terminal
from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord
from ostinato.infra.platform.errors import (
    AgentError,
    OstinatoError,
    SandboxError,
    SandboxLost,
    SandboxTimeout,
    boundary,
    is_retryable,
)

TERMINAL_MARGIN_SECONDS = 5.0
Output = str | Callable[[], str]
Implementation = Callable[[AgentEnvironment, Any, HarnessConfig], Awaitable[Output]]

IMPLEMENTATIONS: Mapping[str, Mapping[str, Implementation]] = {
    "compact": {
        "read_file": read_file,
        "edit_file": edit_file,
        "write_file": write_file,
        "list_dir": list_dir,
        "grep": grep,
        "codebase_search": codebase_search,
        "read_lints": read_lints,
        "run_terminal": run_terminal,
        "todo_write": todo_write,
        "ask_user": ask_user,
    },
    "full": {
        "read_file": full_file_tools.read_file,
        "edit_file": full_file_tools.edit_file,
        "write_file": full_file_tools.write_file,
        "delete_file": full_file_tools.delete_file,
        "list_dir": full_file_tools.list_dir,
        "read_lints": full_file_tools.read_lints,
        "glob": full_search_tools.glob,
        "grep": full_search_tools.grep,
        "codebase_search": full_search_tools.codebase_search,
        "todo_write": full_search_tools.todo_write,
        "ask_user": full_search_tools.ask_user,
        "run_terminal": run_full_terminal,
    },
}


@dataclass(frozen=True, slots=True)
class CallResult:
    """What the model reads and what is recorded of a call."""

    text: str
    record: ToolCallRecord


@dataclass(frozen=True, slots=True)
class _Ran:
    """How one call went; `failure` when it was our fault."""

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

    Raises the first failure of infrastructure (SandboxLost, AgentError ...) that trying again did
    not mend.
    """
    calls = _with_ids(calls, turn) if config.dialect == "full" else calls
    if config.place_tags:  # before any call runs: a tag means what the model has read
        calls = [await follow_place(call, environment) for call in calls]
    touched = [_touched(call, config) for call in calls]
    tasks: list[asyncio.Task[_Ran]] = []
    async with asyncio.TaskGroup() as group:
        for index, call in enumerate(calls):
            earlier = [tasks[j] for j in range(index) if _conflict(touched[j], touched[index])]
            tasks.append(group.create_task(_run_call(call, environment, config, earlier)))
    done = [task.result() for task in tasks]
    for ran in done:
        if ran.failure is not None:
            raise ran.failure
    texts = _word_results(calls, done, environment, config)
    return [
        CallResult(text, _record(call, ran, text))
        for call, ran, text in zip(calls, done, texts, strict=True)
    ]


def _with_ids(calls: Sequence[ParsedCall], turn: int) -> list[ParsedCall]:
    """Every call under an id of its own; a second use of one is the caller's mistake."""
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
    if config.place_tags:
        for index, call in enumerate(calls):
            if call.tool in LISTING_TOOLS:
                texts[index], places = tag_places(texts[index])
                environment.state.places = places or environment.state.places
    limits = [config.result_limit_characters] * len(texts)
    if config.turn_limit_characters is not None:
        lengths = [min(len(text), config.result_limit_characters) for text in texts]
        limits = share_out(config.turn_limit_characters, lengths)
    if config.dialect == "compact":
        return [cut_middle(text, limit) for text, limit in zip(texts, limits, strict=True)]
    return [
        f"[{call.call_id} {call.tool or 'call'} {ran.status}]\n{cut_lines(text, limit)}"
        for call, ran, text, limit in zip(calls, done, texts, limits, strict=True)
    ]


def _record(call: ParsedCall, ran: _Ran, text: str) -> ToolCallRecord:
    return ToolCallRecord(
        tool=call.tool,
        arguments=call.arguments,
        status=ran.status,
        result_characters=len(text),
        wall_seconds=ran.wall_seconds,
        call_id=call.call_id,
    )


Touched = tuple[frozenset[str], frozenset[str]]


def _touched(call: ParsedCall, config: HarnessConfig) -> Touched:
    if call.status is not CallStatus.OK:
        return frozenset(), frozenset()
    return resources(CATALOGUES[config.dialect][call.tool], call.arguments)


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
    environment: AgentEnvironment,
    config: HarnessConfig,
    earlier: Sequence[asyncio.Task[_Ran]],
) -> _Ran:
    if earlier:
        await asyncio.wait(earlier)
    if call.status is not CallStatus.OK:
        return _Ran(call.status, f"error: {call.error}")
    started = time.perf_counter()
    ran = await _run_implementation(call, environment, config)
    return replace(ran, wall_seconds=time.perf_counter() - started)


async def _run_implementation(
    call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig
) -> _Ran:
    """The call's outcome; whatever it raises becomes a status or a failure of ours."""
    try:
        with boundary(AgentError, f"tool {call.tool}"):
            async with asyncio.timeout(_limit_seconds(call, environment, config)):
                return await _try_implementation(call, environment, config)
    except SandboxTimeout as error:
        return _Ran(CallStatus.TIMEOUT, f"error: {error}")
    except OstinatoError as error:
        if isinstance(error.__cause__, TimeoutError):
            limit = f"{config.call_time_limit_seconds:g} seconds"
            return _Ran(CallStatus.TIMEOUT, f"error: {call.tool} ran longer than {limit}")
        if is_retryable(error) or not isinstance(error, SandboxError):
            return _Ran(CallStatus.ENVIRONMENT, "", failure=error)
        return _Ran(CallStatus.ENVIRONMENT, f"error: {error}")


async def _try_implementation(
    call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig
) -> _Ran:
    """What the model did wrong is a status; what we did wrong is tried again, then raised."""
    implementation = IMPLEMENTATIONS[config.dialect][call.tool]
    given = call.arguments if config.dialect == "compact" else call.values
    retrying = AsyncRetrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(1 + config.infrastructure_retries),
        reraise=True,
    )
    try:
        return _Ran(CallStatus.OK, await retrying(implementation, environment, given, config))
    except (RegionError, ToolRefusal) as error:
        return _Ran(CallStatus.INVALID_ARGUMENTS, f"error: {error}")
    except ToolFailure as error:
        return _Ran(CallStatus.ENVIRONMENT, f"error: {error}")
    except ToolTimeout as error:
        return _Ran(CallStatus.TIMEOUT, f"error: {error}")


def _may_pass(error: BaseException) -> bool:
    """A lost sandbox does not come back; other faults of ours may be gone the next time."""
    return is_retryable(error) and not isinstance(error, SandboxLost)


def _limit_seconds(call: ParsedCall, environment: AgentEnvironment, config: HarnessConfig) -> float:
    """A terminal ends its own command and keeps what it printed; the harness waits a little more."""
    if call.tool == "ask_user" and environment.ask_limit_seconds is not None:
        return environment.ask_limit_seconds
    margin = TERMINAL_MARGIN_SECONDS if call.tool == "run_terminal" else 0.0
    return config.call_time_limit_seconds + (margin if config.dialect == "full" else 0.0)
