"""Repairs of one function as the harness would record them, and calls and texts that demonstrations
share with them.
"""

import random
import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from ostinato.infra.agent.regions import Region, show_lines
from ostinato.infra.agent.tools.names import PASSED
from ostinato.models.rendering import Renderer
from ostinato.models.rendering.vocabulary import line_tag
from ostinato.tasks.corpus.config import DemonstrationConfig
from ostinato.tasks.corpus.source_code.functions import CodeFunction
from ostinato.tasks.problems.breaking.mutations import Mutation

RUN_TESTS = "<run_terminal>pytest</run_terminal>"
FIXED = "Fixed."
GAVE_UP = "Could not fix it."
NOT_FOUND = "Could not find it."
LINE_NAMED_SHARE = 0.35  # of real failures without undefined names: point at the broken line
OTHER_LINE_SHARE = 0.15  # of the same: point at another line of the function
PLAIN_FAILURE = "failed: AssertionError"
_PLACE = re.compile(r" at <L\d+>$")


class RepairScript(StrEnum):
    """Course of a repair between reading the function and the end."""

    RIGHT = "right"
    WRONG_THEN_RIGHT = "wrong_then_right"
    GIVE_UP = "give_up"
    START_OVER = "start_over"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one repair: several calls per turn or one at a time, and its script."""

    is_parallel: bool
    script: RepairScript

    @property
    def name(self) -> str:
        """Name of the plan in statistics."""
        return f"{'parallel' if self.is_parallel else 'sequential'}_{self.script}"


def draw_plan(style: DemonstrationConfig, rng: random.Random) -> Plan:
    """A plan with the config's shares."""
    is_parallel = rng.random() < style.parallel_share
    draw = rng.random()
    if draw < style.wrong_first_share:
        script = RepairScript.WRONG_THEN_RIGHT
    elif draw < style.wrong_first_share + style.give_up_share:
        script = RepairScript.GIVE_UP
    elif draw < style.wrong_first_share + style.give_up_share + style.start_over_share:
        script = RepairScript.START_OVER
    else:
        script = RepairScript.RIGHT
    return Plan(is_parallel, script)


def place_of(path: str, symbol: str) -> str:
    """Argument of read_file for a function whose name is known."""
    return f"{path}::{symbol}"


def read_call(place: str) -> str:
    """The call that shows a function."""
    return f"<read_file>{place}</read_file>"


def edit_call(number: int, text: str) -> str:
    """The call that replaces one line of the region read last."""
    return f"<edit_file>{line_tag(number)}{text}</edit_file>"


def read_turns(plan: Plan, place: str) -> list[list[str]]:
    """The calls of the turns before the first edit.

    With one call per turn the function is read first, so that the report can name its lines.
    """
    read = read_call(place)
    return [[RUN_TESTS, read]] if plan.is_parallel else [[read], [RUN_TESTS]]


def edit_turns(plan: Plan, edit: str) -> list[list[str]]:
    """The calls of the turns that edit and run the tests."""
    return [[edit, RUN_TESTS]] if plan.is_parallel else [[edit], [RUN_TESTS]]


def view_lines(lines: tuple[str, ...]) -> str:
    """Lines as read_file shows them."""
    view, _ = show_lines(Region("", (), lines, ()), len(lines))
    return view


@dataclass(slots=True)
class Document:
    """Token ids and their loss mask."""

    token_ids: list[int]
    loss_mask: list[bool]

    def add(self, token_ids: list[int], is_trained: bool) -> None:
        """Appends tokens, all of them trained on or none."""
        self.token_ids += token_ids
        self.loss_mask += [is_trained] * len(token_ids)


@dataclass(frozen=True, slots=True)
class DocumentWriter:
    """Builds documents with one renderer. `prompt_templates` hold {symbol} and {path}."""

    renderer: Renderer
    prompt_templates: tuple[str, ...]

    def write_clean(self, function: CodeFunction) -> list[int]:
        """A function as read_file shows it."""
        return [*self._read(function, function.lines)[:-1], self.renderer.end_of_text_id]

    def write_fill_in(self, function: CodeFunction, number: int) -> list[int]:
        """A function with line `number` empty, then the edit that fills it in."""
        lines = list(function.lines)
        gold, lines[number - 1] = lines[number - 1], ""
        edit = self.renderer.encode_answer(edit_call(number, gold))
        return [*self._read(function, tuple(lines)), *edit, self.renderer.end_of_text_id]

    def _read(self, function: CodeFunction, lines: tuple[str, ...]) -> list[int]:
        call = self.renderer.encode_answer(read_call(place_of(*function.key)))
        shown = self.renderer.append_results([view_lines(lines)])
        return [self.renderer.assistant_id, *call, *shown]

    def write_repair(
        self,
        function: CodeFunction,
        mutation: Mutation,
        *,
        is_parallel: bool,
        report: str,
        rng: random.Random,
    ) -> list[int]:
        """A whole attempt at a mutation. `report` is the test report before the edit."""
        plan = Plan(is_parallel, RepairScript.RIGHT)
        lines = list(function.lines)
        lines[mutation.line_number - 1] = mutation.broken_text
        template = rng.choice(self.prompt_templates)
        place = place_of(*function.key)
        results = {RUN_TESTS: report, read_call(place): view_lines(tuple(lines))}
        ids = self.renderer.start(template.format(symbol=function.symbol, path=function.path))
        for calls in read_turns(plan, place):
            self._add_turn(ids, calls, [results[call] for call in calls])
        edit = edit_call(mutation.line_number, mutation.gold_text)
        results = {RUN_TESTS: PASSED, edit: "ok"}
        for calls in edit_turns(plan, edit):
            self._add_turn(ids, calls, [results[call] for call in calls])
        ids += self.renderer.encode_answer(FIXED)
        return [*ids, self.renderer.end_of_text_id]

    def _add_turn(self, ids: list[int], calls: list[str], results: list[str]) -> None:
        ids += self.renderer.encode_answer("".join(calls))
        ids += self.renderer.append_results(results)


class FailureReports:
    """Texts of real failures by function, and plausible reports for mutations on which no test was run: exact for
    undefined names, else with the text of a real failure of the same function, if one is known.
    """

    def __init__(self) -> None:
        self._asserting: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._raising: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, path: str, symbol: str, report: str) -> None:
        """Stores a real report, unless it is about an undefined name, for which reports are exact."""
        if not report.startswith("failed: ") or "NameError" in report:
            return
        words = _PLACE.sub("", report)
        book = self._asserting if words == report else self._raising
        book[path, symbol].append(words)

    def invent(self, function: CodeFunction, mutation: Mutation, rng: random.Random) -> str:
        """A report for a mutation of `function`."""
        here = f" at {line_tag(mutation.line_number)}"
        if mutation.undefined_name:
            return f"failed: NameError: name '{mutation.undefined_name}' is not defined{here}"
        draw = rng.random()
        raising = self._raising.get(function.key)
        if raising and draw < LINE_NAMED_SHARE:
            return rng.choice(raising) + here
        if raising and draw < LINE_NAMED_SHARE + OTHER_LINE_SHARE:
            return f"{rng.choice(raising)} at {line_tag(rng.randrange(len(function.lines)) + 1)}"
        asserting = self._asserting.get(function.key)
        return rng.choice(asserting) if asserting else PLAIN_FAILURE
