"""Plausible test reports for mutations on which no test was run: exact for undefined names, else
with the text of a real failure of the same function, if one is known.
"""

import random
import re
from collections import defaultdict

from ostinato.models.rendering.vocabulary import line_tag
from ostinato.tasks.corpus.source_code.functions import CodeFunction
from ostinato.tasks.problems.breaking.mutations import Mutation

LINE_NAMED_SHARE = 0.35  # of real failures without undefined names: point at the broken line
OTHER_LINE_SHARE = 0.15  # of the same: point at another line of the function
PLAIN_FAILURE = "failed: AssertionError"
_PLACE = re.compile(r" at <L\d+>$")


class FailureReports:
    """Texts of real failures by function."""

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
