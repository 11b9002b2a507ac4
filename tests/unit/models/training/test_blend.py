"""Mixing sources over a phase."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.models.training.batch import PhaseData, count_before, draw_sources
from ostinato.models.training.config import PhaseConfig
from tests.fakes.corpus import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def make_phase(**changes: object) -> PhaseConfig:
    fields = {"name": "p", "blend": {"code": (1, 1)}, "tokens": 6400, "sequence_tokens": 32}
    return PhaseConfig.model_validate(
        fields | {"microbatch_tokens": 64, "global_batch_tokens": 128} | changes
    )


def test_draw_sources_stays_within_one_of_its_shares() -> None:
    shares_NS = np.tile([0.5, 0.3, 0.2], (200, 1))
    counts_NS = np.cumsum(np.eye(3)[draw_sources(shares_NS)], axis=0)
    assert np.abs(counts_NS - np.cumsum(shares_NS, axis=0)).max() <= 1


def test_draw_sources_follows_changing_shares() -> None:
    progress = np.linspace(0, 1, 1000)
    drawn = draw_sources(np.stack([1 - progress, progress], axis=1))
    assert drawn[:100].mean() < 0.1
    assert drawn[-100:].mean() > 0.9
    assert abs(drawn.mean() - 0.5) < 0.01


def test_count_before_numbers_each_source() -> None:
    assert count_before(np.array([1, 0, 1, 1, 0])).tolist() == [0, 0, 1, 2, 1]


def test_phase_data_microbatch_by_number_does_not_depend_on_what_was_read(corpus: Path) -> None:
    phase = make_phase(
        blend={"code": (1, 0), "library": (0, 1), "demonstrations": (0.5, 0.5)},
        microbatch_tokens=128,
    )
    read, fresh = PhaseData(phase, corpus, seed=1), PhaseData(phase, corpus, seed=1)
    batches = [read.microbatch(index) for index in range(50)]
    assert torch.equal(batches[49].tokens_BT, fresh.microbatch(49).tokens_BT)
    assert torch.equal(batches[7].loss_mask_BT, fresh.microbatch(7).loss_mask_BT)


def test_phase_data_of_transcripts_only_draws_nothing_else(corpus: Path) -> None:
    data = PhaseData(
        make_phase(blend={"demonstrations": (1, 1)}, microbatch_tokens=128), corpus, seed=0
    )
    assert data.microbatch(3).padding_BT.any()
    assert not data.rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatch_tokens": 48}, "must divide microbatch_tokens=48"),
        ({"global_batch_tokens": 100}, "must divide global_batch_tokens=100"),
        ({"tokens": 100}, "wanted at least global_batch_tokens"),
        ({"blend": {"code": (1, 0)}}, "shares at its end sum to 0"),
        ({"blend": {"code": (-1, 1)}}, "wanted >= 0"),
    ],
)
def test_phase_with_impossible_numbers_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_phase(**changes)


def test_learning_rate_rises_holds_and_falls() -> None:
    phase = make_phase(tokens=12_800, warmup_steps=4, decay_ratio=0.3)
    scales = [phase.learning_rate_scale(step) for step in range(phase.num_steps)]
    assert scales[:4] == [0.2, 0.4, 0.6, 0.8]
    assert set(scales[4:69]) == {1.0}
    assert scales[70:] == sorted(scales[70:], reverse=True)
    assert 0 < scales[-1] < 0.05
