"""Runs the calls of one turn.

Owns the order: a call waits for the earlier calls it conflicts with (one writes what the other
touches) and otherwise runs beside them; there is exactly one result per call, in call order,
whatever fails. Parsed calls in, results out.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infra.errors import SandboxError, SandboxLost
from infra.harness.config import HarnessConfig
from infra.harness.environment import AgentEnvironment, ToolFailure
from infra.harness.file_tools import edit_file, list_dir, read_file, read_lints, write_file
from infra.harness.other_tools import ask_user, codebase_search, grep, run_terminal, todo_write
from infra.harness.parse import ParsedCall
from infra.harness.regions import RegionError
from infra.harness.report import cut_middle
from infra.harness.tools import TOOLS, covers, resources
from infra.harness.transcript import CallStatus, ToolCallRecord

Output = str | Callable[[], str]
Implementation = Callable[[AgentEnvironment, dict[str, str], HarnessConfig], Awaitable[Output]]

IMPLEMENTATIONS: dict[str, Implementation] = {
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
}


@dataclass(frozen=True, slots=True)
class CallResult:
    """What the model reads and what is recorded of a call."""

    text: str
    record: ToolCallRecord


@dataclass(frozen=True, slots=True)
class _Ran:
    """How one call went; `lost` when the sandbox went with it."""

    status: CallStatus
    output: Output
    wall_seconds: float = 0.0
    lost: SandboxLost | None = None


async def execute_calls(
    calls: Sequence[ParsedCall], environment: AgentEnvironment, config: HarnessConfig
) -> list[CallResult]:
    """One result per call, in call order. Raises SandboxLost when the sandbox itself is gone."""
    touched = [_touched(call) for call in calls]
    tasks: list[asyncio.Task[_Ran]] = []
    async with asyncio.TaskGroup() as group:
        for index, call in enumerate(calls):
            earlier = [tasks[j] for j in range(index) if _conflict(touched[j], touched[index])]
            tasks.append(group.create_task(_run_call(call, environment, config, earlier)))
    results: list[CallResult] = []
    for call, task in zip(calls, tasks, strict=True):
        ran = task.result()
        if ran.lost is not None:
            raise ran.lost
        text = ran.output if isinstance(ran.output, str) else ran.output()
        text = cut_middle(text, config.result_limit_characters)
        record = ToolCallRecord(
            tool=call.tool,
            arguments=call.arguments,
            status=ran.status,
            result_characters=len(text),
            wall_seconds=ran.wall_seconds,
        )
        results.append(CallResult(text, record))
    return results


Touched = tuple[frozenset[str], frozenset[str]]


def _touched(call: ParsedCall) -> Touched:
    if call.status is not CallStatus.OK:
        return frozenset(), frozenset()
    return resources(TOOLS[call.tool], call.arguments)


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
    status, output, lost = CallStatus.OK, "", None
    try:
        async with asyncio.timeout(config.call_time_limit_seconds):
            output = await IMPLEMENTATIONS[call.tool](environment, call.arguments, config)
    except RegionError as error:
        status, output = CallStatus.INVALID_ARGUMENTS, f"error: {error}"
    except ToolFailure as error:
        status, output = CallStatus.ENVIRONMENT, f"error: {error}"
    except TimeoutError:
        limit = config.call_time_limit_seconds
        status, output = CallStatus.TIMEOUT, f"error: {call.tool} ran longer than {limit:g} seconds"
    except SandboxLost as error:
        status, lost = CallStatus.ENVIRONMENT, error
    except SandboxError as error:
        status, output = CallStatus.ENVIRONMENT, f"error: {error}"
    return _Ran(status, output, time.perf_counter() - started, lost)
