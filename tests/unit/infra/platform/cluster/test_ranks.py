"""Marks of ranks: one for each process, gone with a rank that ends as it should."""

import os
from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.processes import is_alive
from ostinato.infra.platform.cluster.ranks import mark_rank, marked_rank, marked_ranks


def test_a_rank_is_marked_while_it_works_and_after_an_error(tmp_path: Path) -> None:
    mark_rank(tmp_path, 11)
    with marked_rank(tmp_path, 2):
        marks = marked_ranks(tmp_path)
        assert list(marks) == [2, 11]
        assert marks[2].pid == os.getpid()
        assert is_alive(marks[2])
    assert list(marked_ranks(tmp_path)) == [11]

    with pytest.raises(ValueError, match="broken"), marked_rank(tmp_path, 3):
        raise ValueError("broken")
    assert list(marked_ranks(tmp_path)) == [3, 11]
