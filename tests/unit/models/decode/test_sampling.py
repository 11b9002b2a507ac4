"""Sampling draws from the distribution it reports, and from nothing else than seed and position."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from ostinato.models.decode.sampling import (
    NoiseSource,
    SamplingRules,
    keep_top_k,
    keep_top_p,
    sample_rows,
    seed_key,
)

LOGITS_V = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 0.7, 1.5])
NOISE = NoiseSource(len(LOGITS_V))


def draw(
    rows: int, temperature: float, top_p: float = 1.0, seed: int = 11
) -> tuple[np.ndarray, np.ndarray]:
    rules = SamplingRules(np.full(rows, temperature, np.float32), np.full(rows, top_p, np.float32))
    noise_RV = NOISE.exponential(np.full(rows, seed_key(seed)), np.arange(rows))
    return sample_rows(LOGITS_V.expand(rows, -1), rules, noise_RV)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    tokens_R, logprobs_R = draw(20_000, temperature)
    expected_V = torch.softmax(LOGITS_V.double() / temperature, -1).numpy()
    counts_V = np.bincount(tokens_R, minlength=len(expected_V))
    assert chisquare(counts_V, expected_V * len(tokens_R)).pvalue > 1e-3
    np.testing.assert_allclose(logprobs_R, np.log(expected_V)[tokens_R], atol=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises() -> None:
    tokens_R, logprobs_R = draw(5_000, 1.0, top_p=0.6)
    probabilities_V = torch.softmax(LOGITS_V, -1).numpy()
    order = np.argsort(-probabilities_V)
    kept = order[: int(np.searchsorted(np.cumsum(probabilities_V[order]), 0.6)) + 1]
    assert set(tokens_R.tolist()) == set(kept.tolist())
    expected = probabilities_V / probabilities_V[kept].sum()
    np.testing.assert_allclose(logprobs_R, np.log(expected)[tokens_R], atol=1e-5)


def test_top_k_then_top_p_keep_the_likeliest_and_renormalise() -> None:
    rows = 5_000
    rules = SamplingRules(
        np.ones(rows, np.float32), np.full(rows, 0.7, np.float32), np.full(rows, 4)
    )
    noise_RV = NOISE.exponential(np.full(rows, seed_key(11)), np.arange(rows))
    tokens_R, logprobs_R = sample_rows(LOGITS_V.expand(rows, -1), rules, noise_RV)
    probabilities_V = torch.softmax(LOGITS_V, -1).numpy()
    four = np.argsort(-probabilities_V)[:4]
    shares = probabilities_V[four] / probabilities_V[four].sum()
    kept = four[: int(np.searchsorted(np.cumsum(shares), 0.7)) + 1]
    assert set(tokens_R.tolist()) == set(kept.tolist())
    expected = probabilities_V / probabilities_V[kept].sum()
    np.testing.assert_allclose(logprobs_R, np.log(expected)[tokens_R], atol=1e-5)


def test_top_k_of_equal_tokens_keeps_the_first() -> None:
    kept_RV = keep_top_k(torch.full((1, 8), 0.125), torch.tensor([3]))
    torch.testing.assert_close(kept_RV, torch.tensor([[1 / 3] * 3 + [0.0] * 5]))


def test_top_p_of_one_leaves_other_rows_alone() -> None:
    probabilities_RV = torch.softmax(LOGITS_V, -1).expand(2, -1)
    kept_RV = keep_top_p(probabilities_RV, torch.tensor([0.5, 1.0]))
    assert (kept_RV[0] > 0).sum() < len(LOGITS_V)
    torch.testing.assert_close(kept_RV[1], probabilities_RV[1])


def test_greedy_takes_the_maximum_and_reports_the_models_logprob() -> None:
    tokens_R, logprobs_R = draw(50, 0.0)
    assert set(tokens_R.tolist()) == {3}
    np.testing.assert_allclose(logprobs_R, LOGITS_V.log_softmax(-1)[3].item(), atol=1e-6)


def test_noise_depends_on_seed_and_position_only() -> None:
    seeds = np.array([seed_key(seed) for seed in (5, 5, 9, 5)])
    positions = np.array([0, 7, 0, 0])
    noise = NOISE.exponential(seeds, positions)
    np.testing.assert_array_equal(noise[0], noise[3])
    assert len({row.tobytes() for row in noise}) == 3
    np.testing.assert_array_equal(noise[1:2], NOISE.exponential(seeds[1:2], positions[1:2]))


@pytest.mark.parametrize("vocab_size", [33, 1280, 50_000])
def test_noise_made_ahead_is_the_noise_of_its_place(vocab_size: int) -> None:
    """Steps forward as drafts hold, back as they fail, to other requests and to batches of many."""
    walking, rng = NoiseSource(vocab_size), np.random.default_rng(0)
    position, seed = 0, 1
    for _ in range(60):
        rows = int(rng.integers(1, 7))
        seeds = np.full(rows, seed_key(seed))
        if rng.random() < 0.2:
            seeds[-1] = seed_key(seed + 1)
        positions = np.arange(position, position + rows)
        if rng.random() < 0.2:
            positions = positions[::-1].copy()
        fresh = [
            NoiseSource(vocab_size).exponential(seeds[i : i + 1], positions[i : i + 1])
            for i in range(rows)
        ]
        np.testing.assert_array_equal(walking.exponential(seeds, positions), np.concatenate(fresh))
        position = max(0, position + int(rng.integers(-2, 9)))
        seed += rng.random() < 0.1


def test_noise_is_exponential_and_never_zero() -> None:
    noise = NoiseSource(1024).exponential(
        np.array([seed_key(seed) for seed in range(400)]), np.full(400, 3)
    )
    assert noise.min() > 0
    assert kstest(noise.ravel()[::7], "expon").pvalue > 1e-3
    neighbours = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(neighbours) < 0.01
