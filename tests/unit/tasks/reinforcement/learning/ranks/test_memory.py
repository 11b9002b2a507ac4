"""Weights leave a rank as the tensors that it owns: what publishing and saving take of its memory falls as one over the
ranks (a model of 97 M parameters: `tests/benchmarks/trainer_memory.py`).
"""

from pathlib import Path

import pytest

from tests.benchmarks.trainer_memory import LARGEST_RATIO, peaks_by_ranks
from tests.fakes.small_spec import make_spec


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_memory_of_publishing_and_saving_falls_with_the_ranks(tmp_path: Path) -> None:
    spec = make_spec(4096, 256, heads=(8, 8, 32), experts=(4, 2, 256), num_layers=6)
    peaks = peaks_by_ranks(spec, tmp_path)
    for ranks, peak in peaks.items():
        assert peak * ranks <= LARGEST_RATIO * peaks[1], peaks
