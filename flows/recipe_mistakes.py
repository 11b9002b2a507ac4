"""What is wrong with a recipe, as text for the person who wrote it."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ostinato.infra.platform.errors import ConfigError

_MAX_BITS = 63  # of an integer
MAX_DEPTH = 32  # of nested tables and arrays


def explain_mistakes(source: str, recipe: type[BaseModel], error: ValidationError) -> str:
    """A line for each mistake: the key, the value seen and what is wrong with it, and for an unknown key the known ones."""
    lines = [f"recipe {source} has {error.error_count()} mistake(s):"]
    for mistake in error.errors(include_url=False):
        key = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            known = _known_keys(recipe, mistake["loc"][:-1])
            close = _keys_above(recipe, mistake["loc"]) or difflib.get_close_matches(
                str(mistake["loc"][-1]), known, n=1
            )
            hint = f"did you mean {close[0]!r}? " if close else ""
            lines.append(f"  {key}: unknown key; {hint}known keys: {', '.join(known)}")
        elif isinstance(mistake["input"], dict):
            # The input is a whole section. The message already names the values.
            lines.append(f"  {key or 'the whole'}: {mistake['msg']}")
        else:
            lines.append(f"  {key} = {mistake['input']!r}: {mistake['msg']}")
    return "\n".join(lines)


def _known_keys(recipe: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of the section at this place, as far as the annotations show."""
    section: Any = recipe
    for part in location:
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return []
        section = field.annotation
    return sorted(getattr(section, "model_fields", {}))


def _keys_above(recipe: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Settings of the same name in the enclosing sections."""
    *section, name = location
    around = (section[:depth] for depth in reversed(range(1, len(section))))
    return [
        ".".join(map(str, (*above, name))) for above in around if name in _known_keys(recipe, above)
    ]


def refuse_numbers(value: Any, source: str, key: str = "") -> None:
    """Raises ConfigError for numbers that are not finite or exceed 64 bits, and for values nested too deep."""
    if key.count(".") > MAX_DEPTH:
        raise ConfigError(
            f"recipe {source}: {key[:60]} is more than {MAX_DEPTH} levels deep, wanted less"
        )
    if isinstance(value, Mapping):
        for name, inner in value.items():
            refuse_numbers(inner, source, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            refuse_numbers(inner, source, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"recipe {source}: {key} is {value}, wanted a finite number")
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        bits = value.bit_length()
        raise ConfigError(f"recipe {source}: {key} has {bits} bits, wanted at most {_MAX_BITS}")
