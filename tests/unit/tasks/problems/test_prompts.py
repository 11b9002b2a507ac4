"""When a wording leaves open which function is meant, which names it may hold, and how long it may be."""

import re

import pytest

from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, PromptLevel, Wording
from ostinato.tasks.problems.prompts import find_names, is_ambiguous, topic_words, write_prompt
from ostinato.tasks.problems.proving.judging import ProofOutcome, ProofResult
from ostinato.tasks.records import BlockEdit

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


NAMES = ("merge_with", "first", "Box.size", "Something.look", "Feature.gone.back", "_Users.need")
MADE = (
    Kind.MUTATION, Kind.COMBINED, Kind.MULTI_PLACE, Kind.DELETED_FUNCTION, Kind.DELETED_FEATURE,
)  # fmt: skip
DOCSTRINGS = ("", "The first of all items in a box.", "Merges mappings by a function. More text.")


def prompt_of(level, kind, symbol, docstring, wording, seed=0):
    made = candidate(symbol, kind)
    block = BlockEdit(path="kit/wanted.py", first_line=1, gold_lines=("a",), broken_lines=())
    made = made.model_copy(
        update={
            "touched": (("kit/m.py", 1, symbol),),
            "blocks": (block,),
            "repository": "yesterday",
        }
    )
    judged = ProofResult(
        candidate_id=made.candidate_id,
        finding=ProofOutcome.PROVEN,
        error_type="ValueError",
        error_message="a long message of the test that failed " * 3,
    )
    return write_prompt(level, made, judged, None, docstring, seed, wording)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("symbol", NAMES)
def test_a_vague_prompt_without_names_holds_no_name_and_no_file(kind: Kind, symbol: str) -> None:
    wording = Wording(vague_names=False)
    names = {part.strip("_").lower() for part in symbol.split(".")} | {"wanted", "m"}
    for docstring in DOCSTRINGS:
        for seed in range(8):
            text = prompt_of(PromptLevel.VAGUE, kind, symbol, docstring, wording, seed)
            words = {word.strip("_").lower() for word in re.findall(r"\w+", text)}
            assert text
            assert not words & names, text
            assert ".py" not in text


def test_names_are_found_in_any_case_and_file_names_too() -> None:
    made = candidate("Box._size")
    assert find_names("The box of m.py has size_", made) == ["box", "size_"]
    block = BlockEdit(path="kit/m.py", first_line=1, gold_lines=("a",), broken_lines=())
    changed = made.model_copy(update={"blocks": (block,)})
    assert find_names("kit/m.py", changed) == ["m"]
    assert find_names("the boxes and their sizes", changed) == []


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("limit", [80, 390])
def test_terse_prompts_keep_to_their_limit(kind: Kind, limit: int) -> None:
    wording = Wording(terse_characters=limit)
    docstring = "Words " * 100
    lengths = [
        len(prompt_of(PromptLevel.TERSE, kind, symbol, docstring, wording, seed))
        for symbol in NAMES
        for seed in range(8)
    ]
    assert max(lengths) <= limit
