from hypothesis import given
from hypothesis import strategies as st

from infra.sandbox.inside.wire import FrameDecoder, encode_frame

HEADERS = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(), st.text(), st.none(), st.booleans())
)


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
