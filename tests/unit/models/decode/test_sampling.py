"""Sampling draws from the distribution it reports, and from nothing else than seed and position."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from ostinato.models.decode.sampling import (
    exponential_noise,
    keep_top_k,
    keep_top_p,
    sample_rows,
    seed_key,
)

LOGITS_V = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 0.7, 1.5])


def draw(
    rows: int, temperature: float, top_p: float = 1.0, seed: int = 11, top_k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    noise_RV = exponential_noise(len(LOGITS_V), np.full(rows, seed_key(seed)), np.arange(rows))
    return sample_rows(
        LOGITS_V.expand(rows, -1),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k),
        noise_RV,
    )


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
    tokens_R, logprobs_R = draw(5_000, 1.0, top_p=0.7, top_k=4)
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
    noise = exponential_noise(8, seeds, positions)
    np.testing.assert_array_equal(noise[0], noise[3])
    assert len({row.tobytes() for row in noise}) == 3
    np.testing.assert_array_equal(noise[1:2], exponential_noise(8, seeds[1:2], positions[1:2]))


def test_noise_is_exponential_and_never_zero() -> None:
    noise = exponential_noise(
        1024, np.array([seed_key(seed) for seed in range(400)]), np.full(400, 3)
    )
    assert noise.min() > 0
    assert kstest(noise.ravel()[::7], "expon").pvalue > 1e-3
    neighbours = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(neighbours) < 0.01
