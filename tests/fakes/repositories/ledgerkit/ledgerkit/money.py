"""Amounts in cents."""

import functools


def _checked(function):
    """Refuse amounts that are not whole cents."""

    @functools.wraps(function)
    def wrapper(cents, *arguments, **options):
        if not isinstance(cents, int):
            raise TypeError(f"cents must be int, not {type(cents).__name__}")
        return function(cents, *arguments, **options)

    return wrapper


def _make_symbols(names):
    """Symbols by currency name."""
    return {name: name[:1].upper() for name in names}


SYMBOLS = _make_symbols(["euro", "dollar", "pound"])


@_checked
def format_amount(cents, currency="euro"):
    """Text such as `E 12.05`."""
    whole, rest = divmod(abs(cents), 100)
    sign = "-" if cents < 0 else ""
    return f"{SYMBOLS[currency]} {sign}{whole}.{rest:02d}"


def parse_amount(text):
    """Cents of a text that `format_amount` wrote."""
    number = text.split()[-1]
    sign = -1 if number.startswith("-") else 1
    whole, _, rest = number.lstrip("-").partition(".")
    return sign * (int(whole) * 100 + int(rest or 0))


@_checked
def split_amount(cents, parts):
    """Shares that add up; the first ones are larger."""
    share, rest = divmod(cents, parts)
    return [share + 1 if index < rest else share for index in range(parts)]
