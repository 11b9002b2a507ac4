"""Ranks of one machine: the first one's answer counts where all others end as well."""

import os
import time

import pytest

from ostinato.models.layout import ParallelLayout
from ostinato.models.training import data_parallel
from ostinato.models.training.data_parallel import LostRank, run_ranks


def end_otherwise(how: str, rank: int) -> int:
    """Rank 0 answers; the other one raises, is killed, or does not end."""
    if rank and how == "raise":
        raise ValueError("rank 1 could not write its part")
    if rank and how == "kill":
        os.kill(os.getpid(), 9)
    if rank and how == "hang":
        time.sleep(600)
    return rank


@pytest.mark.parametrize(
    ("how", "wait_seconds", "wanted"),
    [
        ("raise", 60.0, r"exit codes \{1: 1\}"),
        ("kill", 60.0, r"signals by rank \{1: 9\}"),
        ("hang", 1.0, r"exit codes \{1: None\}"),
    ],
)
@pytest.mark.sampled(1)
def test_an_answer_does_not_hide_what_became_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, how: str, wait_seconds: float, wanted: str
) -> None:
    monkeypatch.setattr(data_parallel, "EXIT_WAIT_SECONDS", wait_seconds)
    with pytest.raises(LostRank if how == "kill" else RuntimeError, match=wanted):
        run_ranks(end_otherwise, how, ParallelLayout(data=2))
