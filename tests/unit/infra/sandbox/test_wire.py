import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.infra.sandbox.inside.wire import FrameDecoder, encode_frame

# The machine may be loaded: how long an example takes says nothing.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HEADERS = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(), st.text(), st.none(), st.booleans())
)


@PATIENT
@given(
    st.lists(st.tuples(HEADERS, st.lists(st.binary(max_size=40), max_size=3)), max_size=4),
    st.data(),
)
def test_frames_survive_any_cut_of_the_stream(messages, data):
    stream = b"".join(encode_frame(header, blobs) for header, blobs in messages)
    decoder = FrameDecoder()
    received = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += decoder.feed(stream[:size])
        stream = stream[size:]
    assert received == messages


@PATIENT
@given(st.binary(max_size=200), st.data())
def test_any_bytes_are_waited_on_decoded_or_refused_in_one_way(stream, data):
    decoder = FrameDecoder()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        try:
            frames = decoder.feed(stream[:size])
        except ValueError:
            return
        assert all(isinstance(header, dict) for header, _ in frames)
        stream = stream[size:]


@PATIENT
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_frames_with_a_false_inside_are_refused(text, blobs):
    frame = len(text).to_bytes(4, "big") + len(blobs).to_bytes(4, "big") + text + blobs
    with pytest.raises(ValueError, match=r"."):
        FrameDecoder().feed(frame)


def test_frames_over_the_limit_are_refused_before_they_arrive():
    with pytest.raises(ValueError, match="at most"):
        FrameDecoder().feed(b"\xff\xff\xff\xff\x00\x00\x00\x00")
