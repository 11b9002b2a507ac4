"""Lines for the person at the console."""

from rich.console import Console


def say(line: str) -> None:
    """Prints one line as it is."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def print_error(error: BaseException) -> None:
    """Prints a known error in one line, in red."""
    text = f"{type(error).__name__}: {error}"
    Console(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)
