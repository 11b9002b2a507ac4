"""Files of strangers that lie about their sizes or are nested without end: one sentence, at once."""

import struct
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.conversion.sources import open_source

HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"a"
ODD_GGUF = {
    "array": HEAD + KEY + struct.pack("<IIQ", 9, 0, 2**60),
    "array of arrays": HEAD + KEY + struct.pack("<IIQ", 9, 9, 2**60),
    "array of strings": HEAD + KEY + struct.pack("<IIQ", 9, 8, 2**60),
    "string": HEAD + KEY + struct.pack("<IQ", 8, 2**60),
    "key": HEAD + struct.pack("<Q", 2**60),
    "fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "dimensions": b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I", 2**31),
    "deep": HEAD + KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
}


@pytest.mark.parametrize("kind", ODD_GGUF)
def test_a_gguf_that_says_more_than_it_holds_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(ODD_GGUF[kind] + b"\0" * 64)
    with (
        pytest.raises(ConfigError, match=r"a\.gguf cannot be read"),
        open_source(str(file), tmp_path, tmp_path),
    ):
        pass


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"rope_theta": NaN}'])
def test_json_that_is_too_deep_or_has_no_number_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with (
        pytest.raises(ConfigError, match=r"config\.json is (nested 100000 levels deep|not JSON)"),
        open_source(str(tmp_path), tmp_path, tmp_path),
    ):
        pass
