"""Mismatch KL: known values, zero at equality, alarms."""

import numpy as np
import pytest

from ostinato.infra.serving.engine.parity import ParityMonitor, measure_mismatch


def test_equal_sides_have_no_mismatch() -> None:
    logprobs = np.log(np.linspace(0.1, 0.9, 50)).astype(np.float32)
    mismatch = measure_mismatch(logprobs, logprobs)
    assert (mismatch.k1, mismatch.k3, mismatch.p99_ratio, mismatch.tokens) == (0.0, 0.0, 1.0, 50)


def test_k3_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = rng.choice(3, size=200_000, p=engine)
    mismatch = measure_mismatch(np.log(engine)[tokens], np.log(trainer)[tokens])
    divergence = float((engine * np.log(engine / trainer)).sum())
    assert mismatch.k3 == pytest.approx(divergence, rel=0.05)
    assert mismatch.k1 == pytest.approx(divergence, rel=0.1)


def test_monitor_raises_the_alarm_on_a_gap_and_on_nan() -> None:
    monitor = ParityMonitor("run")
    monitor.observe(0, np.zeros(4), np.full(4, 1e-4))
    assert monitor.alarms == 0
    monitor.observe(1, np.zeros(4), np.full(4, 0.2))
    monitor.observe(2, np.zeros(4), np.full(4, np.nan))
    assert monitor.alarms == 2


def test_an_alarm_tells_what_replay_was_worth() -> None:
    monitor = ParityMonitor("run", alarm_k3=1e-3)
    logprobs = np.full(8, -1.0)
    good = measure_mismatch(logprobs, logprobs + 1e-5)
    bad = measure_mismatch(logprobs, logprobs + 0.3)
    assert monitor.judge(1, good, bad) is None  # routes differ, replay mends it
    alarm = monitor.judge(2, bad, bad)
    assert alarm is not None
    assert (alarm.step, alarm.k3, alarm.k3_without_replay) == (2, bad.k3, bad.k3)
    assert (monitor.alarms, monitor.worst_k3) == (1, bad.k3)


def test_arrays_that_are_not_parallel_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted equal"):
        measure_mismatch(np.zeros(3), np.zeros(4))
