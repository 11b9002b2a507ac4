"""Lines for the person at the console."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

_WATCH_SECONDS = 3.0
_FILE_COLUMNS = 120  # width of tables in files and pipes, where there is no terminal to ask
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# marks that change the direction of the line, and bytes of file names that are not UTF-8
_PICTURES |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
_is_watched: ContextVar[bool] = ContextVar("is_watched", default=False)


def as_printable(text: str) -> str:
    """Text of a model, a tool or a file with its control characters replaced by visible symbols."""
    return text.translate(_PICTURES)


def say(text: str) -> None:
    """Prints text to stderr as it is, with control characters made visible."""
    Console(stderr=True).out(as_printable(text), highlight=False)


def open_console() -> Console:
    """A console on standard output, for tables."""
    return Console(width=shutil.get_terminal_size((_FILE_COLUMNS, 24)).columns)


def print_error(error: BaseException) -> None:
    """Prints a known error to stderr, in red."""
    text = as_printable(f"{type(error).__name__}: {error}")
    Console(stderr=True).out(text, style="red", highlight=False)


@contextmanager
def watched(is_asked: bool) -> Iterator[None]:
    """If asked, progress of stages within the block is printed as lines on stderr, on a terminal or not."""
    token = _is_watched.set(is_asked)
    try:
        yield
    finally:
        _is_watched.reset(token)


def is_watched() -> bool:
    """Whether progress is printed as lines here."""
    return _is_watched.get()


class WatchLines:
    """Lines of a stage's progress: one when it changed, at most every few seconds, and always the last."""

    def __init__(self, stage: str, now: Callable[[], float] = time.monotonic) -> None:
        self._stage = stage
        self._now = now
        self._printed_at = float("-inf")
        self._printed = self._newest = ""

    def update(self, done: float, total: float, message: str) -> None:
        """Records progress, and prints it when the last line is old enough."""
        self._newest = f"{self._stage}: {done:g}/{total:g} {message}"
        if self._now() - self._printed_at >= _WATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Prints the newest progress unless it was printed."""
        if self._newest != self._printed:
            say(self._newest)
            self._printed, self._printed_at = self._newest, self._now()
