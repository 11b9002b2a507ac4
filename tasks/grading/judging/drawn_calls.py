"""Calls with drawn arguments: of the problem's function, and of the other code that a change touches.

The original makes the calls in boxes of its own, and a change in the box of its trial. Results are compared here.
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
_APART_SECONDS = 1_000_000  # between the clocks of the original's two runs, to expose clock values
_FACTOR = 10.0  # allowed multiple of the original's time and memory
_SLACK_SECONDS = 0.02  # allowed in addition, per call
_SLACK_BYTES = 2048.0  # allowed in addition, per call
_LEAST_TIMED = 3  # fewer calls of a function are not timed
_STABLE_FLAGS = ("stays", "stays_on_object", "acts_on_object", "is_read")
_HARM_OF_FACT = {
    "changes argument": Harm.ARGUMENTS, "prints": Harm.OUTPUT, "changes": Harm.SURROUNDINGS,
    "raises": Harm.EXCEPTION_TEXT,
}  # fmt: skip
Line = dict[str, Any]


@dataclass(frozen=True)
class DrawnCalls:
    """Calls with drawn arguments, and the original's results."""

    calls: tuple[Line, ...]
    wanted: tuple[Line, ...]
    repeated_call: Line | None  # call of the problem's function that is made many times
    repeats: int
    seconds: float  # total time of the original's calls


@dataclass
class Differences:
    """Differences of a change from the original. `difference` concerns values; empty: none."""

    difference: str = ""
    harms: dict[Harm, str] = field(default_factory=dict)

    def add_facts(self, facts: frozenset[str], place: str) -> None:
        """Adds the harms of facts that the original does not show."""
        for fact in sorted(facts):
            harms = (harm for start, harm in _HARM_OF_FACT.items() if fact.startswith(start))
            harm = next(harms, None)
            if harm is not None:
                self.harms.setdefault(harm, f"{place} {fact}")


async def draw_original_calls(
    sandboxes: tuple[Sandbox, Sandbox],
    drawn: DrawnTests,
    known: Sequence[str],
    modules: Sequence[tuple[str, Sequence[str]]],
) -> DrawnCalls:
    """Calls of the problem's function with arguments near the known ones, and calls of the functions of `modules`.
    The original makes them in each of two boxes, so that values that depend on a box (file times) differ.
    """
    path, symbol = drawn.function or ("", "")
    name = f"{module_of(path)}:{symbol}"
    given = [{"function": name, "on": None, "arguments": text} for text in known]
    request = {
        "root": drawn.root, "order": drawn.order, "modules": modules,
        "function": name if symbol else "",
        "has_shape": _has_shape(path, symbol, drawn),
        "known": given,
    }  # fmt: skip
    calls, _ = await _run(sandboxes[0], "draw", request, drawn, 0)
    own = [call for call in calls if call.get("function") == name]
    own.sort(key=lambda call: not call.get("has_effect"))
    made = DrawnCalls(tuple(calls), (), own[0] if own else None, count_repeats(drawn), 0.0)
    first, second = [
        await _make(it, drawn, made, _SECONDS, run) for run, it in enumerate(sandboxes)
    ]
    wanted = tuple(_stable(*pair) for pair in zip(first, second, strict=False))
    seconds = max(sum(line.get("seconds", 0.0) for line in lines) for lines in (first, second))
    return DrawnCalls(made.calls, wanted, made.repeated_call, made.repeats, seconds)


def _has_shape(path: str, symbol: str, drawn: DrawnTests) -> bool:
    """Whether callers outside the file may rely on the parameters of the problem's function."""
    is_private = any(part.startswith("_") and part[:2] != "__" for part in symbol.split("."))
    is_program = path.endswith("__main__.py")
    return bool(symbol) and not (drawn.is_rewritten or is_private or is_program)


async def compare_calls(
    sandbox: Sandbox, drawn: DrawnTests, made: DrawnCalls, found: Differences
) -> None:
    """Adds the differences between the change in a box and the original to `found`."""
    limit = _FACTOR * made.seconds + _SECONDS
    lines = await _make(sandbox, drawn, made, limit, 0) if made.calls else []
    own = made.repeated_call["function"] if made.repeated_call else ""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    different: list[str] = []
    for entry, seen, wanted in _aligned(made, lines):
        name = entry.get("name") or entry.get("function", "")
        place = format_call(name, entry["arguments"]) if "arguments" in entry else name
        if seen.get("late"):
            found.harms.setdefault(Harm.SLOW, f"{place}: the calls before took {limit:.0f} s")
            if (
                not drawn.is_rewritten
            ):  # a recipe may charge slowness, but not what was never compared
                found.difference = f"too slow for {place} and later drawn calls to be compared"
            return
        if seen.get("takes"):
            found.harms.setdefault(Harm.VANISHED, f"{name} {seen['takes']}")
        if not wanted:
            continue
        is_idle = wanted.get("has_effect", False) and not seen.get("has_effect")
        if is_idle or ("result" in wanted and not is_same(seen.get("result"), wanted["result"])):
            different += [place] if name == own else []
            detail = f"{place} gives {seen.get('result')}, wanted {wanted['result']}"
            found.harms |= {} if name == own else {Harm.OTHER_CODE: detail[:300]}
        found.add_facts(frozenset(seen.get("facts", ())) - wanted["facts"], place)
        times[name].append((seen.get("seconds", 0.0), wanted["seconds"]))
    if different and not drawn.is_rewritten:
        found.difference = f"differs from the original in {len(different)} drawn calls"
    for name, pairs in times.items():
        ours, original = (statistics.median(side) for side in zip(*pairs, strict=True))
        if len(pairs) >= _LEAST_TIMED:
            add_time(found, name, ours, original)
    if made.repeated_call and len(lines) > len(made.calls) and len(made.wanted) > len(made.calls):
        _compare_repeated(lines[-1], made.wanted[-1], found, own)


def add_time(found: Differences, name: str, seconds: float, original: float) -> None:
    """Adds the harm of a slow call, given the median times of the change and of the original."""
    if seconds > _FACTOR * original + _SLACK_SECONDS:
        detail = (
            f"a call of {name} takes {1000 * seconds:.1f} ms, the original {1000 * original:.1f} ms"
        )
        found.harms.setdefault(Harm.SLOW, detail)


def count_repeats(drawn: DrawnTests) -> int:
    """Number of repetitions of a call, drawn so that no change knows it beforehand."""
    return 400 + drawn.order % 1200


def find_stable_repeats(first: Line | None, second: Line | None) -> Line | None:
    """Results of a repeated call of the tests on which two runs of the original agree. None: no such result."""
    if not first or not second or not second["is_copied"] or first["key"] != second["key"]:
        return None
    stays = {name: first[name] and second[name] for name in _STABLE_FLAGS}
    return {**first, **stays, "leaked": max(first["leaked"], second["leaked"], 0.0)}


def compare_repeats(seen: Line, wanted: Line, found: Differences, name: str) -> None:
    """Adds the differences that a repeated call of the tests shows between a change and the original."""
    if not seen["is_copied"]:
        found.difference = f"objects on which {name} is called cannot be copied any more"
        return
    if any(wanted[flag] and not seen[flag] for flag in _STABLE_FLAGS):
        found.difference = found.difference or f"{name} gives something else after many calls"
    _compare_leaked(seen, wanted, found, name)


def _compare_repeated(seen: Line, wanted: Line, found: Differences, name: str) -> None:
    is_changed = "worn" in wanted and not is_same(seen.get("worn"), wanted["worn"])
    if is_changed or (wanted.get("stays") and not seen.get("stays")):
        found.difference = found.difference or f"{name} differs from the original after many calls"
    _compare_leaked(seen, wanted, found, name)


def _compare_leaked(seen: Line, wanted: Line, found: Differences, name: str) -> None:
    leaked = float(seen.get("leaked", 0.0))
    if leaked > _FACTOR * wanted["leaked"] + _SLACK_BYTES:
        found.harms.setdefault(Harm.LEAKING, f"{name} keeps {leaked:.0f} bytes a call")


def _aligned(made: DrawnCalls, lines: Sequence[Line]) -> Iterator[tuple[Line, Line, Line]]:
    """Calls with the results of a change and of the original. Calls that the change did not reach have no result."""
    for place, (entry, wanted) in enumerate(zip(made.calls, made.wanted, strict=False)):
        yield entry, lines[place] if place < len(lines) else {}, wanted


def _stable(first: Line, second: Line) -> Line:
    """Results on which two runs of the original agree. Empty: nothing to compare."""
    if "leaked" in first and "leaked" in second:
        kept = {"worn": first["worn"]} if first["worn"] == second["worn"] else {}
        kept["stays"] = first["stays"] and second["stays"]
        return {**kept, "leaked": max(first["leaked"], second["leaked"], 0.0)}
    result = first.get("result")
    if result is None or result != second.get("result") or "timeout" in result:
        return {}
    if "raises" in result and not first.get("is_refused"):
        return {}
    facts = frozenset((*first["facts"], *second["facts"]))
    return {
        "result": result,
        "facts": facts,
        "seconds": max(first["seconds"], second["seconds"]),
        "has_effect": first.get("has_effect", False) and second.get("has_effect", False),
    }


async def _make(
    sandbox: Sandbox, drawn: DrawnTests, made: DrawnCalls, seconds: float, run: int
) -> list[Line]:
    request: Mapping[str, Any] = {
        "root": drawn.root, "calls": made.calls, "worn": made.repeated_call, "repeats": made.repeats,
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
