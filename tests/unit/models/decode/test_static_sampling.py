"""The device's sampler draws what the host's draws."""

import numpy as np
import torch

from ostinato.models.decode.sampling import NoiseSource, SamplingRules, sample_rows, seed_key
from ostinato.models.decode.static_sampling import DeviceNoise, draw_rows

VOCABULARY = 400


def keys_and_positions(rows: int) -> tuple[np.ndarray, np.ndarray]:
    keys_R = np.array([seed_key(seed * 7919 - 3) for seed in range(rows)], dtype=np.uint64)
    return keys_R, np.random.default_rng(0).integers(0, 2**20, rows)


def on_device(keys_R: np.ndarray, positions_R: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(keys_R.view(np.int64)), torch.from_numpy(positions_R)


def test_noise_bits_are_those_of_the_host() -> None:
    """The host's noise comes out of the device's bits by the host's own logarithm, bit for bit."""
    keys_R, positions_R = keys_and_positions(64)
    bits_RV = DeviceNoise(VOCABULARY, "cpu").uniform_bits(*on_device(keys_R, positions_R)).numpy()
    uniform_RV = (bits_RV.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    expected_RV = NoiseSource(VOCABULARY).exponential(keys_R, positions_R)
    np.testing.assert_array_equal(np.negative(np.log(uniform_RV)), expected_RV)


def test_noise_differs_in_the_last_places_of_the_logarithm_alone() -> None:
    """Of float32 logarithms numpy's vector loops miss the last place by up to 4, torch's by 1."""
    keys_R, positions_R = keys_and_positions(64)
    noise_RV = DeviceNoise(VOCABULARY, "cpu").exponential(*on_device(keys_R, positions_R)).numpy()
    expected_RV = NoiseSource(VOCABULARY).exponential(keys_R, positions_R)
    np.testing.assert_array_max_ulp(noise_RV, expected_RV, maxulp=5)


def test_mixed_rules_draw_the_tokens_of_the_host() -> None:
    """Log-probs to 2e-6: the two sum the probabilities that are kept in another order."""
    rows = 240
    rng = np.random.default_rng(1)
    logits_RV = torch.from_numpy(rng.normal(0, 3, (rows, VOCABULARY)).astype(np.float32))
    rules = SamplingRules(
        rng.choice(np.array([0, 0.3, 1, 1.7], dtype=np.float32), rows),
        rng.choice(np.array([0.2, 0.9, 1, 1], dtype=np.float32), rows),
        rng.choice(np.array([0, 0, 1, 5, 1000]), rows),
    )
    keys_R, positions_R = keys_and_positions(rows)
    noise_RV = NoiseSource(VOCABULARY).exponential(keys_R, positions_R)
    tokens_R, logprobs_R = sample_rows(logits_RV, rules, noise_RV)
    assert rules.top_k_R is not None
    limits = torch.from_numpy(rules.top_k_R), torch.from_numpy(rules.top_p_R)
    drawn_R, drawn_logprobs_R = draw_rows(
        logits_RV,
        DeviceNoise(VOCABULARY, "cpu").exponential(*on_device(keys_R, positions_R)),
        torch.from_numpy(rules.temperature_R),
        limits,
    )
    np.testing.assert_array_equal(drawn_R.numpy(), tokens_R)
    np.testing.assert_allclose(drawn_logprobs_R.numpy(), logprobs_R, atol=2e-6)


def test_a_row_without_limits_keeps_every_bit_beside_one_that_has_some() -> None:
    logits_RV = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    noise_RV = DeviceNoise(VOCABULARY, "cpu").exponential(*on_device(*keys_and_positions(6)))
    temperature_R = torch.full((6,), 0.7)
    free = draw_rows(logits_RV, noise_RV, temperature_R, None)
    top_k_R, top_p_R = torch.tensor([0, 3, 0, 0, 0, 0]), torch.tensor([1, 1, 0.5, 1, 1, 1.0])
    mixed = draw_rows(logits_RV, noise_RV, temperature_R, (top_k_R, top_p_R))
    for before, after in zip(free, mixed, strict=True):
        assert torch.equal(before[[0, 3, 4, 5]], after[[0, 3, 4, 5]])
