"""Laws of stop strings: where the text is cut depends on the characters only, never on the tokens
they came in, and what was called settled stays.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.serving.gateway.answers.generation import AnswerText

# few characters, so that stops begin, overlap and break off often; one of them is three bytes long
TEXTS = st.text(alphabet="ab\n漢", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n漢", min_size=1, max_size=4), max_size=4)
CUTS = st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=8)


def pieces_of(data: bytes, lengths: list[int]) -> list[bytes]:
    pieces, at, turn = [], 0, 0
    while at < len(data):
        pieces.append(data[at : at + lengths[turn % len(lengths)]])
        at, turn = at + len(pieces[-1]), turn + 1
    return pieces


def read_plainly(text: str, stops: list[str]) -> str:
    """The definition: characters one by one until a stop is whole, then without that stop."""
    for end in range(1, len(text) + 1):
        said = text[:end]
        whole = [stop for stop in stops if said.endswith(stop)]
        if whole:
            return said[: end - max(len(stop) for stop in whole)]
    return text


@given(TEXTS, STOPS, CUTS)
def test_text_is_cut_where_reading_by_character_cuts_it(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    answer = AnswerText(stops)
    settled = ""
    for piece in pieces_of(text.encode(), lengths):
        is_stopped = answer.feed(piece)
        assert answer.stable_text.startswith(settled)
        settled = answer.stable_text
        if is_stopped:
            break
    answer.close()
    assert answer.text == read_plainly(text, stops)
    assert answer.text.startswith(settled)
    assert answer.is_stopped == any(stop in text for stop in stops)


@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop(text: str, stops: list[str]) -> None:
    answer = AnswerText(stops)
    if not answer.feed(text.encode()):
        held = text[len(answer.stable_text) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(st.binary(max_size=16), CUTS)
def test_bytes_that_are_no_text_read_as_the_renderer_reads_them(
    data: bytes, lengths: list[int]
) -> None:
    answer = AnswerText()
    for piece in pieces_of(data, lengths):
        answer.feed(piece)
    answer.close()
    assert answer.text == data.decode("utf-8", "replace")


def test_half_a_character_at_the_end_can_complete_a_stop() -> None:
    answer = AnswerText(["\ufffd"])
    assert not answer.feed(b"ab\xe6")
    assert answer.close()
    assert answer.text == "ab"


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted strings of 1 character or more"):
        AnswerText([""])
