"""Which kinds of one-line bugs a set's first mutations are: mixed, and drawn by the seed."""

from collections import Counter

import pytest

from ostinato.tasks.problems.config import Kind, ProblemsConfig, Quotas
from ostinato.tasks.problems.selection import Sources, find_candidates
from tests.fakes.repositories import LEDGERKIT, WORDKIT, cover_everything, open_repository

MAX_SHARE = 0.2
QUOTA = 30


def first_mutations(source, seed=0):
    sources = Sources.read(open_repository(source))
    quotas = Quotas(mutation=QUOTA, trials_ratio=1.0)
    config = ProblemsConfig(seed=seed)
    return find_candidates(sources, cover_everything(sources), config, quotas)[Kind.MUTATION]


@pytest.mark.parametrize("source", [WORDKIT, LEDGERKIT])
@pytest.mark.parametrize("seed", range(4))
def test_no_operator_fills_a_quota_while_others_have_candidates(source, seed):
    counts = Counter(item.operator for item in first_mutations(source, seed))
    assert sum(counts.values()) == QUOTA
    assert max(counts.values()) <= MAX_SHARE * QUOTA
    assert len(counts) >= 10


def test_the_seed_draws_the_operator_of_each_function():
    first = {seed: [item.operator for item in first_mutations(LEDGERKIT, seed)] for seed in (0, 1)}
    assert first[0] != first[1]
    assert first[0] == [item.operator for item in first_mutations(LEDGERKIT, 0)]
