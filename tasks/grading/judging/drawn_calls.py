"""Calls with drawn arguments: of the problem's function, and of the other code that a change touches.

The original makes them in a box of its own, a change in the box of its trial; the results are compared here.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.infra.sandbox.function_calls import format_call, run_call_program
from ostinato.infra.sandbox.protocol import Sandbox
from ostinato.infra.sandbox.repository import module_of
from ostinato.tasks.grading.config import Harm
from ostinato.tasks.grading.judging.drawn_tests import DrawnTests

_TOLERANCE = 1e-9

_SECONDS = 10.0
_APART_SECONDS = 1_000_000  # clocks of the original's two runs: what a clock decides differs
_FACTOR = 10.0  # of the original's time and memory
_SLACK_SECONDS = 0.02  # of one call
_SLACK_BYTES = 2048.0  # of one call
_LEAST_TIMED = 3  # calls of a function
_OF_FACTS = {
    "changes argument": Harm.ARGUMENTS, "prints": Harm.OUTPUT, "changes": Harm.SURROUNDINGS,
    "raises": Harm.EXCEPTION_TEXT,
}  # fmt: skip
Line = dict[str, Any]


@dataclass(frozen=True)
class DrawnCalls:
    """Calls and what the original gives."""

    calls: tuple[Line, ...]
    wanted: tuple[Line, ...]
    worn: Line | None  # call of the problem's function that is repeated
    repeats: int
    seconds: float  # of all calls of the original


@dataclass
class Found:
    """Differences of a change from the original. `difference`: of values; empty: none."""

    difference: str = ""
    harms: dict[Harm, str] = field(default_factory=dict)

    def add_facts(self, facts: frozenset[str], place: str) -> None:
        """Harms of facts that the original does not show."""
        for fact in sorted(facts):
            harm = next((it for start, it in _OF_FACTS.items() if fact.startswith(start)), None)
            if harm is not None:
                self.harms.setdefault(harm, f"{place} {fact}")


async def draw_original_calls(
    sandbox: Sandbox,
    drawn: DrawnTests,
    known: Sequence[str],
    modules: Sequence[tuple[str, Sequence[str]]],
) -> DrawnCalls:
    """Calls near the known ones of the problem's function and of other modules' functions, made by the original."""
    path, symbol = drawn.function or ("", "")
    name = f"{module_of(path)}:{symbol}"
    given = [{"function": name, "on": None, "arguments": text} for text in known]
    request = {
        "root": drawn.root, "order": drawn.order, "modules": modules,
        "function": name if symbol else "",
        "known": given,
    }  # fmt: skip
    calls, _ = await _run(sandbox, "draw", request, drawn, 0)
    own = [call for call in calls if call.get("function") == name]
    made = DrawnCalls(tuple(calls), (), own[0] if own else None, 400 + drawn.order % 1200, 0.0)
    first, second = [await _make(sandbox, drawn, made, _SECONDS, run) for run in (0, 1)]
    wanted = tuple(_stable(*pair) for pair in zip(first, second, strict=False))
    seconds = max(sum(line.get("seconds", 0.0) for line in lines) for lines in (first, second))
    return DrawnCalls(made.calls, wanted, made.worn, made.repeats, seconds)


async def compare_calls(
    sandbox: Sandbox, drawn: DrawnTests, made: DrawnCalls, found: Found
) -> None:
    """Adds what tells the change in a box from the original."""
    limit = _FACTOR * made.seconds + _SECONDS
    lines = await _make(sandbox, drawn, made, limit, 0) if made.calls else []
    own = made.worn["function"] if made.worn else ""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    different: list[str] = []
    for entry, seen, wanted in _aligned(made, lines):
        name = entry.get("name") or entry.get("function", "")
        place = format_call(name, entry["arguments"]) if "arguments" in entry else name
        if seen.get("late"):
            found.harms.setdefault(Harm.SLOW, f"{place}: the calls before took {limit:.0f} s")
            return
        if seen.get("takes"):
            found.harms.setdefault(Harm.VANISHED, f"{name} {seen['takes']}")
        if not wanted:
            continue
        if "result" in wanted and not is_same(seen.get("result"), wanted["result"]):
            different += [place] if name == own else []
            told = f"{place} gives {seen.get('result')}, wanted {wanted['result']}"
            found.harms |= {} if name == own else {Harm.OTHER_CODE: told[:300]}
        found.add_facts(frozenset(seen.get("facts", ())) - wanted["facts"], place)
        times[name].append((seen.get("seconds", 0.0), wanted["seconds"]))
    if different and not drawn.is_rewritten:
        found.difference = f"differs from the original in {len(different)} drawn calls"
    for name, pairs in times.items():
        ours, original = (statistics.median(side) for side in zip(*pairs, strict=True))
        if len(pairs) >= _LEAST_TIMED:
            add_time(found, name, ours, original)
    if made.worn and len(lines) > len(made.calls) and len(made.wanted) > len(made.calls):
        _compare_worn(lines[-1], made.wanted[-1], found, own)


def add_time(found: Found, name: str, seconds: float, original: float) -> None:
    """The harm of a median time of a call, if it is one."""
    if seconds > _FACTOR * original + _SLACK_SECONDS:
        told = (
            f"a call of {name} takes {1000 * seconds:.1f} ms, the original {1000 * original:.1f} ms"
        )
        found.harms.setdefault(Harm.SLOW, told)


def _compare_worn(seen: Line, wanted: Line, found: Found, name: str) -> None:
    if "worn" in wanted and not is_same(seen.get("worn"), wanted["worn"]):
        found.difference = found.difference or f"{name} differs from the original after many calls"
    leaked = float(seen.get("leaked", 0.0))
    if leaked > _FACTOR * wanted["leaked"] + _SLACK_BYTES:
        found.harms.setdefault(Harm.LEAKING, f"{name} keeps {leaked:.0f} bytes a call")


def _aligned(made: DrawnCalls, lines: Sequence[Line]) -> Iterator[tuple[Line, Line, Line]]:
    """Calls with what a change and the original show. A change that ended early shows nothing."""
    for place, (entry, wanted) in enumerate(zip(made.calls, made.wanted, strict=False)):
        yield entry, lines[place] if place < len(lines) else {}, wanted


def _stable(first: Line, second: Line) -> Line:
    """What two runs of the original agree on. Empty: nothing to compare."""
    if "leaked" in first and "leaked" in second:
        kept = {"worn": first["worn"]} if first["worn"] == second["worn"] else {}
        return {**kept, "leaked": max(first["leaked"], second["leaked"], 0.0)}
    result = first.get("result")
    if result is None or result != second.get("result") or {"raises", "timeout"} & result.keys():
        return {}
    facts = frozenset((*first["facts"], *second["facts"]))
    return {"result": result, "facts": facts, "seconds": max(first["seconds"], second["seconds"])}


async def _make(
    sandbox: Sandbox, drawn: DrawnTests, made: DrawnCalls, seconds: float, run: int
) -> list[Line]:
    request: Mapping[str, Any] = {
        "root": drawn.root, "calls": made.calls, "worn": made.worn, "repeats": made.repeats,
        "seconds": seconds,
        "luck": drawn.order + run,
    }  # fmt: skip
    return (await _run(sandbox, "try", dict(request), drawn, run))[0]


async def _run(
    sandbox: Sandbox, mode: str, request: Line, drawn: DrawnTests, run: int
) -> tuple[list[Line], object]:
    return await run_call_program(
        sandbox,
        mode,
        request,
        request.get("seconds", _SECONDS) + 4 * _SECONDS,
        hash_seed=drawn.hash_seeds[run],
        shift_seconds=drawn.shift_seconds + run * _APART_SECONDS,
    )


def is_same(one: object, two: object) -> bool:
    """Equality of two forms: exact types, floats within a relative or absolute 1e-9."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return False
        if one.keys() == {"float"}:
            return _is_close(one["float"], two["float"])
        return all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two


def _is_close(one: object, two: object) -> bool:
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    if one == two:
        return True
    try:
        first, second = float.fromhex(one), float.fromhex(two)
    except (ValueError, OverflowError):
        return False
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
