"""Equality of values in their JSON forms."""

import math

_TOLERANCE = 1e-9


def is_same(one: object, two: object) -> bool:
    """Equality of two forms: exact types, floats within a relative or absolute 1e-9."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return False
        if one.keys() == {"float"}:
            return _is_close(one["float"], two["float"])
        return all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two


def _is_close(one: object, two: object) -> bool:
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    if one == two:
        return True
    try:
        first, second = float.fromhex(one), float.fromhex(two)
    except (ValueError, OverflowError):
        return False
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
