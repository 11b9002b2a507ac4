"""Descriptions: markup goes, the name must not stand in them, a prompt gives its sentence back."""

import pytest

from ostinato.tasks.problems.descriptions import (
    first_sentence,
    is_usable,
    read_description,
    write_prompt,
)


def test_first_sentence_is_the_first_of_the_first_paragraph_without_markup() -> None:
    docstring = """Splits *array* like :func:`chunk` does,
        but from `the right`. More of it.

        Args: none.
    """
    assert first_sentence(docstring) == "Splits array like chunk does, but from the right"


@pytest.mark.parametrize(
    ("sentence", "usable"),
    [
        ("Joins lists end to end", True),
        ("Joins lists with concat_all of them", False),
        ("Like concat, but lazy", False),
        ("Joins lists", False),
        ("Joins " + "very " * 30 + "long lists", False),
    ],
)
def test_a_description_is_short_says_something_and_does_not_name_the_function(
    sentence: str, usable: bool
) -> None:
    name = "concat_all" if "_" in sentence else "concat"
    assert is_usable(sentence, name) is usable


def test_a_prompt_gives_back_its_sentence_whatever_stands_in_it() -> None:
    sentence = "Maps key: value pairs to lists"
    assert read_description(write_prompt("kit", sentence)) == sentence
