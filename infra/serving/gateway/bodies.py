"""The bytes of a request's body, looked at before anything is parsed.

One linear pass over pieces. Each takes a fraction of a millisecond, whatever it holds, and the pass ends
at the first limit that is exceeded.
"""

import codecs
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ostinato.infra.serving.gateway.failures import ApiError

PIECE_BYTES = 64 << 10
MAX_NESTING = 32
MAX_BRACKETS = 40_000  # arrays and objects, opened and closed
MAX_COMMAS = 20_000  # values beside each other; each wrong one would be an error to describe
_OPEN, _CLOSE, _COMMA = 1, -1, 2
_ESCAPE_BYTES, _UNICODE_ESCAPE_BYTES = 4, 6  # needed to tell half a pair; all of \uXXXX
_HIGH, _LOW = 1, 2


def _table(marks: dict[bytes, int]) -> NDArray[np.int8]:
    """Mark by byte."""
    table = np.zeros(256, dtype=np.int8)
    for codes, mark in marks.items():
        table[list(codes)] = mark
    return table


_MARKS = _table({b"[{": _OPEN, b"]}": _CLOSE, b",": _COMMA})
_HALVES = _table({b"89abAB": _HIGH, b"cdefCDEF": _LOW})  # the digit after \ud
_NONE = np.zeros(0, dtype=np.int64)


class BodyScan:
    """The state of a pass between two pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes = 0
        self._rest = b""  # an escape that the end of a piece cut
        self._rest_at = 0
        self._is_inside = False  # of a string
        self._depth = self._num_brackets = self._num_commas = 0
        self._wanted_lows = _NONE  # places where the second half of a pair must stand

    def feed(self, piece: bytes, *, is_last: bool) -> None:
        """Takes the next piece. ApiError for a body that is not UTF-8, too deeply nested or too large."""
        self._check_text(piece, is_last=is_last)
        # no backslash that is left is itself escaped
        text = (self._rest + piece).replace(b"\\\\", b"  ")
        end = -1 if is_last else text.find(b"\\", max(0, len(text) - _ESCAPE_BYTES + 1))
        end = len(text) if end < 0 else end
        if b"\\u" in text or len(self._wanted_lows):
            self._check_pairs(np.frombuffer(text, dtype=np.uint8), end, is_last=is_last)
        self._check_structure(text[:end])
        self._rest, self._rest_at = text[end:], self._rest_at + end

    def _check_text(self, piece: bytes, *, is_last: bool) -> None:
        self._num_bytes += len(piece)
        try:
            self._decoder.decode(piece, is_last)
        except UnicodeDecodeError as error:
            start = self._num_bytes - len(error.object) + error.start
            raise ApiError(400, f"body is no UTF-8: {error.reason} at byte {start}") from error
        if b"\0" in piece:
            raise _no_text()

    def _check_pairs(self, codes: NDArray[np.uint8], end: int, *, is_last: bool) -> None:
        """ApiError unless every first half of a surrogate pair has its second, and the other way round."""
        at = np.flatnonzero(codes[: max(0, len(codes) - _ESCAPE_BYTES + 1)] == ord("\\"))
        is_surrogate = (codes[at + 1] == ord("u")) & (codes[at + 2] | 32 == ord("d"))
        at = at[is_surrogate]
        halves = _HALVES[codes[at + 3]]
        lows = self._rest_at + at[halves == _LOW]
        follow_highs = self._rest_at + at[halves == _HIGH] + _UNICODE_ESCAPE_BYTES
        wanted = np.concatenate([self._wanted_lows, follow_highs])
        is_here = wanted < self._rest_at + end
        self._wanted_lows = wanted[~is_here]
        if not np.array_equal(wanted[is_here], lows) or (is_last and len(self._wanted_lows)):
            raise _no_text()

    def _check_structure(self, text: bytes) -> None:
        codes = np.frombuffer(text.replace(b'\\"', b"  "), dtype=np.uint8)
        if not len(codes):
            return
        # an odd number of quotes before a byte: it stands in a string
        is_inside = np.bitwise_xor.accumulate(codes == ord('"')) ^ self._is_inside
        self._is_inside = bool(is_inside[-1])
        marks = _MARKS[codes]
        marks = marks[(marks != 0) & ~is_inside]
        is_comma = marks == _COMMA
        self._num_commas += int(np.count_nonzero(is_comma))
        if self._num_commas > MAX_COMMAS:
            raise ApiError(400, f"body holds more than {MAX_COMMAS} values, wanted fewer")
        brackets = marks[~is_comma]
        self._num_brackets += len(brackets)
        if self._num_brackets > MAX_BRACKETS:
            raise ApiError(
                400, f"body holds more than {MAX_BRACKETS // 2} arrays and objects, wanted fewer"
            )
        if len(brackets):
            depths = self._depth + np.cumsum(brackets, dtype=np.int64)
            self._depth = int(depths[-1])
            if depths.max() > MAX_NESTING:
                raise ApiError(400, f"body is nested deeper than {MAX_NESTING}, wanted less")


def scan_pieces(body: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[None]:
    """Scans a body, one piece for each step of the iterator. ApiError at the first fault."""
    scan = BodyScan()
    for start in range(0, max(len(body), 1), piece_bytes):
        end = start + piece_bytes
        scan.feed(body[start:end], is_last=end >= len(body))
        yield


def _no_text() -> ApiError:
    return ApiError(400, "body holds a zero byte or half a surrogate pair, wanted UTF-8 text")
