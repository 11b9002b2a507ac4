"""When a wording leaves open which function is meant."""

import pytest

from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, PromptLevel
from ostinato.tasks.problems.prompts import is_ambiguous, topic_words

SYMBOLS = ("merge", "merge_with", "Box.size", "Basket.size", "first")


def candidate(symbol: str, kind: Kind = Kind.MUTATION) -> Candidate:
    return Candidate(
        repository="kit",
        kind=kind,
        operator="integer",
        path="kit/m.py",
        symbol=symbol,
        first_line=1,
        last_line=2,
        touched=(),
    )


@pytest.mark.parametrize(
    ("symbol", "level", "kind", "is_open"),
    [
        ("merge", PromptLevel.VAGUE, Kind.MUTATION, True),
        ("merge_with", PromptLevel.VAGUE, Kind.MUTATION, False),
        ("first", PromptLevel.VAGUE, Kind.MUTATION, False),
        ("Box.size", PromptLevel.VAGUE, Kind.MUTATION, False),
        ("merge", PromptLevel.VAGUE, Kind.COMBINED, True),
        ("merge", PromptLevel.TERSE, Kind.MUTATION, False),
        ("merge", PromptLevel.DETAILED, Kind.MUTATION, False),
        ("merge", PromptLevel.VAGUE, Kind.DELETED_FUNCTION, False),
        ("merge", PromptLevel.VAGUE, Kind.MINED_COMMIT, False),
    ],
)
def test_only_the_vague_wording_can_fit_two_functions(symbol, level, kind, is_open) -> None:
    assert is_ambiguous(candidate(symbol, kind), level, SYMBOLS) is is_open


def test_the_topic_is_words_of_name_and_class() -> None:
    assert topic_words("Box.size") == ("box", "size")
    assert topic_words("_get_a_factory") == ("get", "factory")
