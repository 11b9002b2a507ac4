"""Mismatch of trainer and engine: zero at equality, k1 and k3 estimate the divergence."""

import numpy as np
import pytest

from ostinato.tasks.reinforcement.learning.report import measure_mismatch


def test_equal_sides_have_no_mismatch() -> None:
    logprobs = np.log(np.linspace(0.1, 0.9, 50)).astype(np.float32)
    found = measure_mismatch(logprobs, logprobs)
    assert (found.k1_nats, found.k3_nats, found.p99_ratio, found.tokens) == (0.0, 0.0, 1.0, 50)


def test_k3_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = rng.choice(3, size=200_000, p=engine)
    found = measure_mismatch(np.log(trainer)[tokens], np.log(engine)[tokens])
    divergence = float((engine * np.log(engine / trainer)).sum())
    assert found.k3_nats == pytest.approx(divergence, rel=0.05)
    assert found.k1_nats == pytest.approx(divergence, rel=0.1)
