"""Whole calls in one text: where each begins and ends.

Thoughts are told from calls with this before any call is read, also in the middle of a stream. The cost is linear in
the length of the text, whatever a model writes: a tag that is never closed is not searched for at each opening.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property

Span = tuple[int, int]
NextCall = Callable[[int], Span | None]
"""Begin and end of the first whole call at or after a position of one text. None if there is no further one."""
FindCalls = Callable[[str], NextCall]


def no_calls(text: str) -> NextCall:
    """No whole call in any text."""
    return lambda position: None


def calls_like(pattern: str) -> FindCalls:
    """Calls that a pattern matches. At each place the pattern may read a bounded stretch, or all the rest only if it
    then matches.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def find(text: str) -> NextCall:
        def next_call(position: int) -> Span | None:
            found = compiled.search(text, position)
            return None if found is None else found.span()

        return next_call

    return find


def first_of(*finders: FindCalls) -> FindCalls:
    """Calls that any of the finders finds. Of two that begin at one place, the earlier finder's."""

    def find(text: str) -> NextCall:
        nexts = [_kept(finder(text)) for finder in finders]

        def next_call(position: int) -> Span | None:
            spans = [span for each in nexts if (span := each(position)) is not None]
            return min(spans, key=lambda span: span[0], default=None)

        return next_call

    return find


def _kept(next_call: NextCall) -> NextCall:
    """The same for positions that only grow. A call is searched for again once the position has passed its begin."""
    span: Span | None = (-1, -1)

    def next_kept(position: int) -> Span | None:
        nonlocal span
        if span is not None and span[0] < position:
            span = next_call(position)
        return span

    return next_kept


def wrapped_calls(names: str) -> FindCalls:
    """Calls between `<NAME>` and the next `</NAME>`. `names`: pattern of the names."""
    opening, closing = re.compile(f"<(?P<tag>{names})>"), re.compile(f"</(?P<tag>{names})>")

    def find(text: str) -> NextCall:
        closings = Closings(text, closing)

        def next_call(position: int) -> Span | None:
            for begin in opening.finditer(text, position):
                end = closings.after(begin["tag"], begin.end())
                if end is not None:
                    return begin.start(), end[1]
            return None

        return next_call

    return find


def tagged_calls(begin: str, argument: str, closing: str, end: str) -> FindCalls:
    """Calls whose arguments are texts between tags. A group `tag` in the patterns of what opens and of what closes an
    argument holds the tag's name, if tags have different names.
    """
    opening = re.compile(begin)
    patterns = re.compile(argument), re.compile(closing), re.compile(end)

    def find(text: str) -> NextCall:
        ends = _TaggedEnds(text, *patterns)

        def next_call(position: int) -> Span | None:
            for found in opening.finditer(text, position):
                end_at = ends.from_place(found.end())
                if end_at is not None:
                    return found.start(), end_at
            return None

        return next_call

    return find


class _TaggedEnds:
    """Ends of the calls of one text, by places between arguments. Each place is read once."""

    def __init__(
        self,
        text: str,
        argument: re.Pattern[str],
        closing: re.Pattern[str],
        end: re.Pattern[str],
    ) -> None:
        self._text, self._argument, self._end = text, argument, end
        self._closings = Closings(text, closing)
        self._known: dict[int, int | None] = {}

    def from_place(self, place: int) -> int | None:
        """End of the call whose next argument, if any, opens at a place."""
        passed: list[int] = []
        while place not in self._known:
            passed.append(place)
            argument = self._argument.match(self._text, place)
            if argument is None:
                end = self._end.match(self._text, place)
                self._known[place] = None if end is None else end.end()
                continue
            closing = self._closings.after(_tag(argument), argument.end())
            if closing is None:
                self._known[place] = None
            else:
                place = closing[1]
        for each in passed:
            self._known[each] = self._known[place]
        return self._known[place]


class Closings:
    """Closing tags of one text by their names, found in one pass."""

    def __init__(self, text: str, closing: re.Pattern[str]) -> None:
        self._text, self._closing = text, closing

    def after(self, tag: str, position: int) -> Span | None:
        """Begin and end of the first closing tag of a name at or after a position."""
        spans = self._spans.get(tag, [])
        index = bisect_left(spans, (position, position))
        return spans[index] if index < len(spans) else None

    @cached_property
    def _spans(self) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {}
        for found in self._closing.finditer(self._text):
            spans.setdefault(_tag(found), []).append(found.span())
        return spans


def _tag(found: re.Match[str]) -> str:
    """The name of a tag. Empty if its pattern has no group for it."""
    return found.groupdict().get("tag") or ""
