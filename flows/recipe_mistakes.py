"""What is wrong with a recipe, as text for the person who wrote it."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


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
