"""RoPE scaling in GGUF files.

Linear scaling is two fields of the header, which transformers does not read. Llama 3's scaling is a
table with one factor per frequency, without the parameters from which it was computed.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_TENSOR, TENSOR_NAMES, GGUFReader, Keys

from ostinato.infra.platform.errors import ConfigError
from ostinato.models.families.config_fields import ConfigFields
from ostinato.models.network.rope import plain_frequencies

FACTORS = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"
TOLERANCE = 1e-6  # of a factor, relative: fp32 in another order of operations
_OLD_FACTOR = "{arch}.rope.scale_linear"
# Tried in this order: published values first, then similar ones.
_STRETCHES = (8.0, 32.0, 2.0, 4.0, 16.0, 64.0)
_PUBLISHED_HIGH = 4.0
_HIGHS = tuple(quarters / 4 for quarters in range(5, 65))


def read_scaling(
    path: Path, reader: GGUFReader, architecture: str, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """`rope_parameters` with the header's scaling. Raises ConfigError unless it is linear or none."""

    def read(pattern: str, default: Any) -> Any:
        field = reader.get_field(pattern.format(arch=architecture))
        return default if field is None else field.contents()

    # as in llama.cpp: linear if no type is stated, and no scaling without a factor
    kind = read(Keys.Rope.SCALING_TYPE, "linear")
    factor = read(Keys.Rope.SCALING_FACTOR, read(_OLD_FACTOR, 0.0))
    if kind == "none" or factor in (0, 1):
        return dict(rope)
    if kind != "linear":
        name = Keys.Rope.SCALING_TYPE.format(arch=architecture)
        raise ConfigError(f"{path}: {name} = {kind!r} with factor {factor}, wanted none or linear")
    return {**rope, "rope_type": "linear", "factor": _shortest(factor)}


def rotation_factors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """Divisors of the frequencies of `width` columns under `rope_parameters` of type llama3."""
    fields = ConfigFields({"rope_parameters": rope}, "llama").rope(max_tokens=0)
    bands = fields["rope_bands"]
    frequencies = plain_frequencies(width, fields["rope_base"])
    turns = bands.original_tokens / (2 * math.pi / frequencies)
    low, high = bands.low_frequency_factor, bands.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - kept) / bands.factor + kept)).numpy()


def with_factors(
    path: Path, rope: Mapping[str, Any], factors: np.ndarray, width: int
) -> dict[str, Any]:
    """`rope_parameters` that give a table of factors. Raises ConfigError if none do."""
    if factors.shape == (width // 2,) and rope["rope_type"] == "default":
        if (factors == 1).all():
            return dict(rope)
        for found in _candidates(rope, factors.astype(np.float64)):
            if np.allclose(rotation_factors(found, width), factors, rtol=TOLERANCE, atol=0):
                return found
    raise ConfigError(
        f"{path}: tensor {FACTORS} {factors.shape} has factors {factors.min():g} to {factors.max():g} of a "
        f"{rope['rope_type']} rotation, wanted {width // 2} factors of Llama 3's scaling on a default one; "
        "import the directory, whose config.json has its parameters"
    )


def _candidates(rope: Mapping[str, Any], factors: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yields parameters that may give the factors. The factors determine only the ratios of
    original tokens to the low and to the high frequency factor, so the low one is set to 1.
    """
    if not 1 <= factors.min() <= factors.max() < math.inf:
        return
    frequencies = plain_frequencies(2 * len(factors), rope["rope_theta"])
    turns = frequencies.double().numpy() / (2 * math.pi)
    last = _shortest(factors[-1])
    for stretch in (last, *(known for known in _STRETCHES if known > last)):
        if stretch <= 1:
            continue
        kept = (1 / factors - 1 / stretch) / (1 - 1 / stretch)
        is_blended = (factors > 1) & (factors < np.float32(stretch))
        for high, tokens in _fits(turns, kept, is_blended, int((factors == 1).sum())):
            if not (1 < high < math.inf and 1 <= tokens < math.inf):
                continue
            rounded = (2 ** round(math.log2(tokens)), round(tokens / 1024) * 1024, round(tokens))
            for original in filter(None, rounded):
                yield {
                    **rope,
                    "rope_type": "llama3",
                    "factor": stretch,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }


def _fits(
    turns: np.ndarray, kept: np.ndarray, is_blended: np.ndarray, num_kept: int
) -> Iterator[tuple[float, float]]:
    """Yields high frequency factors, each with the original tokens that fit the blended
    frequencies. Without any, tokens lie between those of the last kept and the first stretched
    frequency.
    """
    x, y = turns[is_blended], kept[is_blended]
    highs = (_PUBLISHED_HIGH, *_HIGHS)
    if len(x) > 1:  # tokens * x - 1 = (high - 1) * y of both
        with np.errstate(divide="ignore"):
            fitted = 1 + (x[0] - x[-1]) / (y[0] * x[-1] - y[-1] * x[0])
        highs = (_PUBLISHED_HIGH, *(round(float(fitted), digits) for digits in range(5)))
    for high in highs:
        if len(x):
            yield high, float(((1 + (high - 1) * y) / x).mean())
        elif num_kept:
            yield high, float(high / turns[num_kept - 1] + 1 / turns[num_kept]) / 2


def _shortest(value: float) -> float:
    """The decimal number that was stored in fp32."""
    return float(str(np.float32(value)))
