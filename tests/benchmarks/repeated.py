"""Simulations repeated in processes, each with its own seed, and the share of them that ended in a way."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from scipy import stats


def repeat(pool: ProcessPoolExecutor, work: Callable[..., object], name: str, count: int) -> list:
    """Results of `work(chance)` in order, each with a seed from its name and number."""
    seeds = [[*name.encode(), number] for number in range(count)]
    return list(pool.map(partial(_seeded, work), seeds, chunksize=1))


def _seeded(work: Callable[..., object], seed: list[int]) -> object:
    return work(chance=np.random.default_rng(seed))


def share(found: Sequence[bool]) -> str:
    """A share with its exact 95 % interval."""
    test = stats.binomtest(sum(found), len(found)).proportion_ci()
    return f"{sum(found) / len(found):6.1%} [{100 * test.low:.1f}, {100 * test.high:.1f}]"
