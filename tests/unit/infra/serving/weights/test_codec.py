"""Laws of the codec: what goes in comes out, bit for bit."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ostinato.infra.serving.weights.codec import (
    PARALLEL_FROM_BYTES,
    SAFETENSORS_DTYPES,
    TensorChanges,
    decode_gaps,
    decode_payload,
    difference,
    encode_gaps,
    encode_payload,
    size_bytes,
    whole,
)
from tests.unit.infra.serving.weights.strategies import (
    DENSITIES,
    changed,
    layouts,
    random_bits,
    same_bits,
    seeds,
)


@given(
    st.lists(
        st.one_of(st.integers(0, 300), st.sampled_from([254, 255, 256, 65_534, 65_535, 10**6]))
    )
)
def test_gaps_any_positions_round_trip(gaps: list[int]) -> None:
    positions = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    assert decode_gaps(encode_gaps(positions)).tolist() == positions.tolist()


@pytest.mark.parametrize(
    ("stride", "wanted"), [(1, np.uint8), (250, np.uint8), (40_000, np.uint16), (2**20, np.uint32)]
)
def test_gaps_width_is_the_cheapest(stride: int, wanted: type) -> None:
    positions = np.arange(1, 200, dtype=np.int64) * stride
    assert encode_gaps(positions).dtype == wanted


@given(layouts, seeds, st.sampled_from(DENSITIES))
@settings(deadline=None, max_examples=60)
def test_difference_applied_to_base_is_the_target(layout, seed: int, density: float) -> None:
    generator = np.random.default_rng(seed)
    base = {name: random_bits(generator, *entry) for name, entry in layout.items()}
    target = {name: changed(tensor, generator, density) for name, tensor in base.items()}
    before = {name: tensor.clone() for name, tensor in base.items()}
    decoded = decode_payload(encode_payload(difference(base, target)), base, 1 << 30)
    assert same_bits(decoded, target)
    assert same_bits(base, before)


@given(layouts, seeds)
@settings(deadline=None, max_examples=30)
def test_whole_decodes_from_nothing(layout, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tensors = {name: random_bits(generator, *entry) for name, entry in layout.items()}
    assert same_bits(decode_payload(encode_payload(whole(tensors)), {}, 1 << 30), tensors)


def test_difference_sees_signed_zero_and_nan_payloads() -> None:
    quiet, payload = 0x7FC00000, 0x7FC00001
    base = {"w": torch.tensor([0, quiet, quiet], dtype=torch.int32).view(torch.float32)}
    bits = torch.tensor([-(2**31), quiet, payload], dtype=torch.int32)
    target = {"w": bits.view(torch.float32)}
    assert difference(base, target).changed_elements == 2


def test_difference_of_equal_tensors_is_empty() -> None:
    base = {"w": torch.full((10,), float("nan"))}
    assert difference(base, {"w": base["w"].clone()}).packed == {}


def test_payload_is_what_the_safetensors_library_writes() -> None:
    generator = np.random.default_rng(0)
    tensors = {
        str(dtype): random_bits(generator, dtype, shape)
        for dtype, shape in zip(SAFETENSORS_DTYPES, [(3, 5), (7,), (), (0, 4)] * 4, strict=False)
    }
    changes = TensorChanges(tensors, 0)
    written = zstandard.ZstdDecompressor().decompress(encode_payload(changes))
    assert same_bits(load(written), load(save(tensors)))
    assert len(written) % 8 == len(save(tensors)) % 8


def test_payload_in_threads_is_the_same_weights() -> None:
    generator = np.random.default_rng(1)
    base = {f"w{index}": random_bits(generator, torch.bfloat16, (3_000_000,)) for index in range(6)}
    target = {name: changed(tensor, generator, 0.01) for name, tensor in base.items()}
    assert size_bytes(base) >= PARALLEL_FROM_BYTES
    assert same_bits(
        decode_payload(encode_payload(difference(base, target)), base, 1 << 30), target
    )
    assert same_bits(decode_payload(encode_payload(whole(target)), {}, 1 << 30), target)


@pytest.mark.parametrize("kept_share", [0.0, 0.3, 0.999])
def test_a_torn_payload_is_refused(kept_share: float) -> None:
    weights = {"w": random_bits(np.random.default_rng(2), torch.float32, (40, 40))}
    plain = zstandard.ZstdDecompressor().decompress(encode_payload(whole(weights)))
    torn = zstandard.ZstdCompressor().compress(plain[: int(kept_share * len(plain))])
    with pytest.raises(ValueError, match="payload"):
        decode_payload(torn, {}, 1 << 30)
