"""The differential oracle: a candidate must do what the original does on arguments that no test
shows.

Owns recording calls while tests run, deriving new arguments from them, the results the original
gives, and judging a candidate by them. Enters: a sandbox that holds the repository or a candidate.
Leaves: `FunctionOracle`s and `OracleVerdict`s. Code under test never sees a wanted result: boxes
make calls, the comparison is made here. Top-level functions with literal arguments only.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from infra.errors import ProblemError
from infra.sandbox.protocol import Sandbox
from tasks.problems.config import Config
from tasks.problems.definitions import Definition
from tasks.problems.inside.call_program import decode
from tasks.problems.set_config import OracleConfig

_PROGRAM = "/tmp/call_program.py"
_REQUEST = "/tmp/request.json"
_ANSWER = "/tmp/answer.jsonl"
_RECORD_SECONDS = 300.0
_START_SECONDS = 20.0
_ROOT = "/repo"


class OracleCall(Config):
    """One call with the original's result; both in the JSON form of the box's program."""

    arguments: str
    result: str


class FunctionOracle(Config):
    """What a function does, seen from outside."""

    path: str
    symbol: str
    visible: tuple[OracleCall, ...] = Field(description="made by the tests; may be shown")
    held_out: tuple[OracleCall, ...] = Field(description="derived; never shown")


class OracleVerdict(Config):
    """How far a candidate agrees with the original on held-out arguments."""

    num_calls: int
    num_agreeing: int
    first_difference: str = ""

    @property
    def passed(self) -> bool:
        """Whether it agrees everywhere."""
        return self.num_calls > 0 and self.num_agreeing == self.num_calls


async def record_calls(
    sandbox: Sandbox,
    definitions: Sequence[Definition],
    tests: Sequence[str],
    config: OracleConfig,
) -> dict[tuple[str, str], list[str]]:
    """Arguments by (path, symbol), seen while the tests run on what the sandbox holds."""
    functions = [list(item.call_key) for item in definitions if _is_plain(item)]
    if not functions or not tests:
        return {}
    request = {
        "root": _ROOT,
        "functions": functions,
        "tests": [f"{_ROOT}/{test}" for test in tests],
        "most": config.max_calls_recorded,
    }
    lines = await _run(sandbox, "record", request, _RECORD_SECONDS)
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        path, _, symbol = line["function"].partition(":")
        found[path, symbol] = line["calls"]
    return found


async def build_oracles(
    sandbox: Sandbox,
    recorded: dict[tuple[str, str], list[str]],
    config: OracleConfig,
    seed: int,
) -> list[FunctionOracle]:
    """Results of the original, which the sandbox holds, on recorded and on derived arguments.

    A derived call stays when the original returns twice the same and raises nothing: what it does
    with arguments it refuses is not specified.
    """
    plan: list[tuple[str, str, str]] = []
    for (path, symbol), calls in sorted(recorded.items()):
        derived = derive_arguments(calls, config.max_calls_derived, f"{seed} {path} {symbol}")
        plan += [(path, symbol, arguments) for arguments in (*calls, *derived)]
    first = await _make_calls(sandbox, plan, config)
    second = await _make_calls(sandbox, plan, config)
    visible: dict[tuple[str, str], list[OracleCall]] = {}
    held_out: dict[tuple[str, str], list[OracleCall]] = {}
    for (path, symbol, arguments), one, two in zip(plan, first, second, strict=True):
        if one != two or one is None or "timeout" in one:
            continue
        call = OracleCall(arguments=arguments, result=one)
        if arguments in recorded[path, symbol]:
            visible.setdefault((path, symbol), []).append(call)
        elif not one.startswith('{"raises"'):
            held_out.setdefault((path, symbol), []).append(call)
    return [
        FunctionOracle(
            path=key[0],
            symbol=key[1],
            visible=tuple(visible.get(key, ())),
            held_out=tuple(held_out[key]),
        )
        for key in sorted(held_out)
    ]


async def judge_by_oracle(
    sandbox: Sandbox, oracle: FunctionOracle, config: OracleConfig
) -> OracleVerdict:
    """Compare what the sandbox holds with the original on the held-out calls."""
    plan = [(oracle.path, oracle.symbol, call.arguments) for call in oracle.held_out]
    results = await _make_calls(sandbox, plan, config)
    difference, num_agreeing = "", 0
    for call, result in zip(oracle.held_out, results, strict=True):
        if result == call.result:
            num_agreeing += 1
        elif not difference:
            shown = format_call(oracle.symbol, call.arguments)
            difference = f"{shown} gives {result}, wanted {call.result}"
    return OracleVerdict(
        num_calls=len(plan), num_agreeing=num_agreeing, first_difference=difference
    )


def derive_arguments(calls: Sequence[str], most: int, seed: str) -> list[str]:
    """New argument lists: values of other calls in their place, and values changed a little."""
    rng = random.Random(seed)
    known, derived = set(calls), {}
    parsed = [json.loads(call) for call in calls]
    for _ in range(8 * most):
        if len(derived) >= most or not parsed:
            break
        made = json.loads(json.dumps(rng.choice(parsed)))
        places = [("plain", n) for n in range(len(made["plain"]))]
        places += [("named", name) for name in made["named"]]
        if not places:
            break
        part, where = rng.choice(places)
        if rng.random() < 0.4:
            donors = [other[part] for other in parsed if _has(other[part], where)]
            made[part][where] = rng.choice(donors)[where]
        else:
            made[part][where] = _vary(made[part][where], rng)
        text = json.dumps(made)
        if text not in known:
            derived.setdefault(text)
    return list(derived)


def format_call(symbol: str, arguments: str) -> str:
    """A call as Python text."""
    content = json.loads(arguments)
    shown = [_format(form) for form in content["plain"]]
    shown += [f"{name}={_format(form)}" for name, form in content["named"].items()]
    return f"{symbol}({', '.join(shown)})"


def format_result(result: str) -> str:
    """What a call gave, as Python text; empty when it has none."""
    ((kind, content),) = json.loads(result).items()
    if kind == "returns":
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


def _has(values: Any, where: Any) -> bool:
    return where < len(values) if isinstance(values, list) else where in values


def _vary(form: Any, rng: random.Random) -> Any:
    """A value of the same type, near the given one."""
    if isinstance(form, bool) or form is None:
        return form
    if isinstance(form, int):
        return form + rng.choice((-2, -1, 1, 2, 7))
    if isinstance(form, str):
        ways = (form[::-1], form + form[:3], form[1:], form.swapcase(), f"{form} x")
        return rng.choice(ways)
    ((kind, content),) = form.items()
    if kind in ("list", "tuple") and content:
        items = list(content)
        place = rng.randrange(len(items))
        way = rng.randrange(4)
        if way == 0:
            items.reverse()
        elif way == 1:
            del items[place]
        elif way == 2:
            items.insert(place, items[rng.randrange(len(items))])
        else:
            items[place] = _vary(items[place], rng)
        return {kind: items}
    if kind == "dict" and content:
        place = rng.randrange(len(content))
        key, value = content[place]
        return {"dict": [*content[:place], [key, _vary(value, rng)], *content[place + 1 :]]}
    if kind == "float":
        return {"float": (float(decode(form)) * rng.choice((0.5, 1.5, -1.0))).hex()}
    return form


def _is_plain(definition: Definition) -> bool:
    return not definition.is_class and not definition.is_method


async def _make_calls(
    sandbox: Sandbox, plan: Sequence[tuple[str, str, str]], config: OracleConfig
) -> list[str | None]:
    """Results of (path, symbol, arguments) as text; None where a call ended the process."""
    entries = [
        {"function": f"{_module_of(path)}:{symbol}", "arguments": arguments}
        for path, symbol, arguments in plan
    ]
    results: list[str | None] = []
    while len(results) < len(entries):
        waiting = entries[len(results) :]
        request = {"root": _ROOT, "calls": waiting, "call_seconds": config.call_seconds}
        seconds = _START_SECONDS + config.call_seconds * len(waiting)
        lines = await _run(sandbox, "call", request, seconds)
        results += [json.dumps(line, sort_keys=True) for line in lines[: len(waiting)]]
        if len(results) < len(entries):
            results.append(None)
            if not lines:  # the program itself cannot start or import: nothing else will answer
                results += [None] * (len(entries) - len(results))
    return results


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


async def _run(
    sandbox: Sandbox, mode: str, request: dict, timeout_seconds: float
) -> list[dict[str, Any]]:
    program = Path(__file__).parent / "inside" / "call_program.py"
    await sandbox.write(_PROGRAM, program.read_bytes())
    await sandbox.write(_REQUEST, json.dumps(request).encode())
    await sandbox.write(_ANSWER, b"")
    command = f"python3 -P {_PROGRAM} {mode} {_REQUEST} {_ANSWER}"
    done = await sandbox.exec(command, timeout_seconds)
    answer = await sandbox.read(_ANSWER)
    if mode == "record" and not answer:
        digest = hashlib.sha256(done.output).hexdigest()[:8]
        raise ProblemError(
            f"no call was recorded (output {digest}): exit code {done.exit_code}, "
            f"{done.output[-600:].decode(errors='replace')!r}"
        )
    return [json.loads(line) for line in answer.splitlines() if line.endswith(b"}")]
