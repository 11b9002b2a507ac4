"""The text of one answer while its tokens arrive, cut where a client's stop string begins.

Fed the bytes of one token after another, it has the text so far, the part that no later token can
change, and whether a stop is complete. Of several stops the one that is complete first counts, and
of those the one that begins first, however the text is split into tokens. A stop may begin and end
inside a token.
"""

import codecs
from collections.abc import Sequence


class AnswerText:
    """Text that grows. A character that is not UTF-8 is U+FFFD, as in `Renderer.decode`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError(f"stops are {list(stops)!r}, wanted strings of 1 character or more")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self.stop: str | None = None  # the one that ended it

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def feed(self, token_bytes: bytes) -> bool:
        """Adds one token. True when a stop is now complete. What follows a stop is not taken."""
        return self._add(self._decoder.decode(token_bytes))

    def close(self) -> bool:
        """No token follows: half a character becomes U+FFFD. True when that completed a stop."""
        return self._add(self._decoder.decode(b"", final=True))

    @property
    def settled(self) -> str:
        """The part of the text that stays whatever follows: no end that may begin a stop."""
        if self.is_stopped:
            return self.text
        return self.text[: len(self.text) - self._undecided_characters()]

    def _add(self, characters: str) -> bool:
        if self.is_stopped or not characters:
            return self.is_stopped
        seen = len(self.text)
        self.text += characters
        places = []
        for stop in self._stops:
            start = self.text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                places.append((start + len(stop), start, stop))
        if places:
            _, start, self.stop = min(places)
            self.text = self.text[:start]
        return self.is_stopped

    def _undecided_characters(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
