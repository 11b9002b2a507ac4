"""Frames on the socket between the host and a box: a JSON header and any number of byte blobs.

Standard library only: this file also runs inside the box. Frames hold JSON and plain bytes, never pickle,
because the host must not execute data from a box.
"""

import json
import struct

_PREFIX = struct.Struct(">II")
MAX_FRAME_BYTES = 128 << 20


def encode_frame(header: dict, blobs: list[bytes] | tuple[bytes, ...] = ()) -> bytes:
    """One frame. The decoder returns `blobs` in the same order."""
    text = json.dumps({"header": header, "blob_bytes": [len(blob) for blob in blobs]}).encode()
    return b"".join((_PREFIX.pack(len(text), sum(map(len, blobs))), text, *blobs))


class FrameDecoder:
    """Collects bytes and returns whole frames."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> list[tuple[dict, list[bytes]]]:
        """Adds received bytes and returns the frames that they complete."""
        self._buffer += data
        frames: list[tuple[dict, list[bytes]]] = []
        while len(self._buffer) >= _PREFIX.size:
            text_bytes, blobs_bytes = _PREFIX.unpack_from(self._buffer)
            end = _PREFIX.size + text_bytes + blobs_bytes
            if end > self._max_frame_bytes:
                limit = self._max_frame_bytes
                raise ValueError(f"frame of {end} bytes, at most {limit} are accepted")
            if len(self._buffer) < end:
                break
            frames.append(_split_frame(bytes(self._buffer[_PREFIX.size : end]), text_bytes))
            del self._buffer[:end]
        return frames


def _split_frame(body: bytes, text_bytes: int) -> tuple[dict, list[bytes]]:
    content = json.loads(body[:text_bytes])
    if not isinstance(content, dict) or not isinstance(content.get("header"), dict):
        raise ValueError(f"frame without a header: {body[:text_bytes][:80]!r}")
    sizes = content.get("blob_bytes")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"frame with blobs of {sizes!r:.80} bytes")
    if sum(sizes) != len(body) - text_bytes:
        raise ValueError(f"frame with {len(body) - text_bytes} bytes of blobs, named {sum(sizes)}")
    blobs: list[bytes] = []
    position = text_bytes
    for size in sizes:
        blobs.append(body[position : position + size])
        position += size
    return content["header"], blobs
