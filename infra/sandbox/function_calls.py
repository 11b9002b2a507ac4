"""Calls of functions with given arguments in a box, with results returned as data.

The caller compares the results, so code under test never sees an expected result.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ostinato.infra.sandbox.host.system import build_later_clock
from ostinato.infra.sandbox.inside.value_forms import decode
from ostinato.infra.sandbox.protocol import ExecResult, Sandbox
from ostinato.infra.sandbox.repository import module_of

CALL_ROOT = "/repo"
_INSIDE = Path(__file__).parent / "inside"
_PROGRAM = (
    "call_program.py",
    "cpu_waits.py",
    "sources.py",
    "trials/drawn_calls.py",
    "trials/effects.py",
    "trials/repeated_calls.py",
    "trials/trial_observer.py",
    "trials/watched_calls.py",
    "trials/perturbation.py",
    "value_forms.py",
)
_PLACE = "/tmp/call_program"
# The repository may itself hold a package called ostinato, so the imported modules of this one are dropped.
_START = f"""import sys
sys.path.insert(0, "{_PLACE}")
from ostinato.infra.sandbox.inside.call_program import main
sys.path.remove("{_PLACE}")
for name in [name for name in sys.modules if name.partition(".")[0] == "ostinato"]:
    del sys.modules[name]
main(*sys.argv[1:])"""
_REQUEST = "/tmp/request.json"
_ANSWER = "/tmp/answer.jsonl"
_CLOCK = f"{_PLACE}/clock.so"
_START_SECONDS = 20.0


class CallRequest(NamedTuple):
    """A top-level function of a file, and its arguments in the JSON form of inside/value_forms.py."""

    path: str
    symbol: str
    arguments: str


async def make_calls(
    sandbox: Sandbox,
    calls: Sequence[CallRequest],
    call_seconds: float,
    *,
    mode: Literal["call", "raise"] = "call",
    hash_seed: int = 0,
) -> list[str | None]:
    """One result per call, in the order of the calls. None: the call ended the process.

    `call_seconds`: processor time that one call may use. `mode`: "raise" asks where calls raise, not what they return.
    """
    entries = [
        {"function": f"{module_of(path)}:{symbol}", "arguments": arguments}
        for path, symbol, arguments in calls
    ]
    results: list[str | None] = []
    while len(results) < len(entries):
        waiting = entries[len(results) :]
        request = {"root": CALL_ROOT, "calls": waiting, "call_seconds": call_seconds}
        seconds = _START_SECONDS + call_seconds * len(waiting)
        lines, _ = await run_call_program(sandbox, mode, request, seconds, hash_seed=hash_seed)
        results += [json.dumps(line, sort_keys=True) for line in lines[: len(waiting)]]
        if len(results) < len(entries):
            results.append(None)
            if not lines:  # the program failed to start or import, as it would for all other calls
                results += [None] * (len(entries) - len(results))
    return results


async def run_call_program(
    sandbox: Sandbox,
    mode: str,
    request: dict[str, Any],
    timeout_seconds: float,
    *,
    hash_seed: int = 0,
    shift_seconds: int = 0,
) -> tuple[list[dict[str, Any]], ExecResult]:
    """The program's answer to one request, and its exit. Its clock is `shift_seconds` ahead."""
    await sandbox.write(f"{_PLACE}/ostinato/__init__.py", b"")
    for name in _PROGRAM:
        place = f"{_PLACE}/ostinato/infra/sandbox/inside/{name}"
        await sandbox.write(place, (_INSIDE / name).read_bytes())
    await sandbox.write(_REQUEST, json.dumps(request).encode())
    await sandbox.write(_ANSWER, b"")
    settings = f"PYTHONHASHSEED={hash_seed}"
    if shift_seconds:
        await sandbox.write(_CLOCK, build_later_clock().read_bytes())
        settings += f" LD_PRELOAD={_CLOCK} CLOCK_SHIFT_SECONDS={shift_seconds}"
    command = f"{settings} python3 -P -c '{_START}' {mode} {_REQUEST} {_ANSWER}"
    done = await sandbox.exec(command, timeout_seconds)
    answer = await sandbox.read(_ANSWER)
    lines = [json.loads(line) for line in answer.splitlines() if line.endswith(b"}")]
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError("a line of the program's answer is not a JSON object")
    return lines, done


def format_call(symbol: str, arguments: str) -> str:
    """A call as Python text."""
    content = json.loads(arguments)
    shown = [_format(form) for form in content["plain"]]
    shown += [f"{name}={_format(form)}" for name, form in content["named"].items()]
    return f"{symbol}({', '.join(shown)})"


def format_result(result: str) -> str:
    """Result of a call as Python text. Empty when it returned no result."""
    ((kind, content),) = json.loads(result).items()
    if kind in ("returns", "awaits"):
        return _format(content)
    if kind == "iterates":
        return f"an iterator over [{', '.join(_format(item) for item in content)}]"
    return f"a {content}" if kind == "raises" else ""


def _format(form: Any) -> str:
    if isinstance(form, dict) and "name" in form:
        return form["name"].partition(":")[2]
    if isinstance(form, dict) and "text" in form:
        return form["text"]
    if isinstance(form, dict):
        ((kind, content),) = form.items()
        if kind in ("list", "tuple", "set") and content:
            inner = ", ".join(_format(item) for item in content)
            tail = "," if kind == "tuple" and len(content) == 1 else ""
            return {"list": "[{}]", "tuple": "({})", "set": "{{{}}}"}[kind].format(inner + tail)
        if kind == "dict":
            return "{" + ", ".join(f"{_format(k)}: {_format(v)}" for k, v in content) + "}"
    return repr(decode(form))
