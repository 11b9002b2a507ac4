"""Differential oracles: results of the original on arguments that no test shows.

Calls are recorded while tests run, and then varied. Only top-level functions with literal arguments have oracles.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.environment import open_box
from ostinato.infra.sandbox.function_calls import (
    CALL_ROOT,
    CallRequest,
    make_calls,
    run_call_program,
)
from ostinato.infra.sandbox.inside.value_forms import decode
from ostinato.infra.sandbox.protocol import Sandbox, SandboxLimits
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.definitions import Definition
from ostinato.tasks.problems.config import OracleConfig
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.records import FunctionOracle, OracleCall

_RECORD_SECONDS = 300.0
_MAX_CALLS_RECORDED = 40  # per function
_CHEAPEST_TESTS = 3  # tests run per function
_LIMITS = SandboxLimits(memory_bytes=2 << 30, start_seconds=180.0)


async def oracles_of(
    repository: PreparedRepository,
    definitions: Sequence[Definition],
    baseline: Baseline,
    config: OracleConfig,
    seed: int,
) -> list[FunctionOracle]:
    """Oracles of the functions that stable tests call with literal arguments."""
    tests = baseline.cheapest_tests(definitions, _CHEAPEST_TESTS)
    async with open_box(repository, limits=_LIMITS) as sandbox:
        recorded = await record_calls(sandbox, definitions, tests)
        return await build_oracles(sandbox, recorded, config, seed)


async def record_calls(
    sandbox: Sandbox,
    definitions: Sequence[Definition],
    tests: Sequence[str],
) -> dict[tuple[str, str], list[str]]:
    """Arguments by (path, symbol), recorded while the tests run on the code in the sandbox."""
    functions = [
        list(item.call_key) for item in definitions if not (item.is_class or item.is_method)
    ]
    if not functions or not tests:
        return {}
    request = {
        "root": CALL_ROOT,
        "functions": functions,
        "tests": [f"{CALL_ROOT}/{test}" for test in tests],
        "most": _MAX_CALLS_RECORDED,
    }
    first = await _record(sandbox, request)
    again = {place: frozenset(calls) for place, calls in (await _record(sandbox, request)).items()}
    # calls with names of temporary files or random numbers do not repeat in another run
    return {
        place: [call for call in calls if call in again.get(place, ())]
        for place, calls in first.items()
    }


async def _record(sandbox: Sandbox, request: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    lines, done = await run_call_program(sandbox, "record", request, _RECORD_SECONDS)
    if not lines:
        digest = hashlib.sha256(done.output).hexdigest()[:8]
        raise ProblemError(
            f"no call was recorded (output {digest}): exit code {done.exit_code}, "
            f"{done.output[-600:].decode(errors='replace')!r}"
        )
    places = (line["function"].partition(":") for line in lines)
    return {
        (path, symbol): line["calls"] for (path, _, symbol), line in zip(places, lines, strict=True)
    }


async def build_oracles(
    sandbox: Sandbox,
    recorded: dict[tuple[str, str], list[str]],
    config: OracleConfig,
    seed: int,
) -> list[FunctionOracle]:
    """Results of the original, which is in the sandbox, on recorded and on derived arguments.

    A derived call is kept if the original returns the same value twice and raises nothing, because its
    behaviour on arguments that it refuses is not specified.
    """
    plan: list[CallRequest] = []
    first: list[str | None] = []
    second: list[str | None] = []
    for (path, symbol), calls in sorted(recorded.items()):
        derived = derive_arguments(calls, config.max_calls_derived, f"{seed} {path} {symbol}")
        own = [CallRequest(path, symbol, arguments) for arguments in (*calls, *derived)]
        plan += own
        # each function alone, as in a verdict, because another function may leave state behind
        first += await make_calls(sandbox, own, config.call_seconds)
        second += await make_calls(sandbox, own, config.call_seconds)
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


def derive_arguments(calls: Sequence[str], most: int, seed: str) -> list[str]:
    """New argument lists, made from recorded ones by taking a value from another call or changing it a little."""
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
            others = [other[part] for other in parsed if _has(other[part], where)]
            made[part][where] = rng.choice(others)[where]
        else:
            made[part][where] = _vary(made[part][where], rng)
        text = json.dumps(made)
        if text not in known:
            derived.setdefault(text)
    return list(derived)


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
