"""Which kinds of one-line bugs a set's first mutations are: mixed, and drawn by the seed."""

from collections import Counter

import pytest

from ostinato.tasks.problems.baseline import Baseline
from ostinato.tasks.problems.generation import Sources, generate
from ostinato.tasks.problems.set_config import Kind, PackageSource, ProblemSetConfig, Quotas
from tests.fakes.repositories import LEDGERKIT, WORDKIT, open_repository

MOST_SHARE = 0.2
QUOTA = 30


def first_mutations(source, seed=0):
    sources = Sources.read(open_repository(source))
    every = [item for found in sources.definitions.values() for item in found]
    baseline = Baseline(
        repository=source.name,
        fingerprint="",
        tests=("tests/test_all.py::test_all",),
        seconds=(0.0,),
        num_calls=(1,),
        num_collected=1,
        num_unstable=0,
        num_not_passing=0,
        callers={f"{path}:{line}:{name}": (0,) for path, line, name in (d.call_key for d in every)},
    )
    package = PackageSource(**source.model_dump())
    config = ProblemSetConfig(
        packages=(package,), seed=seed, quotas=Quotas(mutation=QUOTA, trials_ratio=1.0)
    )
    return generate(sources, baseline, config)[Kind.MUTATION]


@pytest.mark.parametrize("source", [WORDKIT, LEDGERKIT])
@pytest.mark.parametrize("seed", range(4))
def test_no_operator_fills_a_quota_while_others_have_candidates(source, seed):
    counts = Counter(item.operator for item in first_mutations(source, seed))
    assert sum(counts.values()) == QUOTA
    assert max(counts.values()) <= MOST_SHARE * QUOTA
    assert len(counts) >= 10


def test_the_seed_draws_the_operator_of_each_function():
    first = {seed: [item.operator for item in first_mutations(LEDGERKIT, seed)] for seed in (0, 1)}
    assert first[0] != first[1]
    assert first[0] == [item.operator for item in first_mutations(LEDGERKIT, 0)]
