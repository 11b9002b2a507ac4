"""RL under a layout: ranks that share experts, matrices, rows or layers take the steps of one rank, and a run that
was killed under one layout goes on under another.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import (
    Microbatch,
    pack,
    pad_to_equal_shapes,
)
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ParityConfig,
    RouterReplayConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.report import StepReport
from tests.unit.tasks.reinforcement.learning.ranks.test_ranks import (
    CHAIN,
    SPEC,
    Weights,
    batch,
    distance,
    make_request,
    on_ranks,
    open_trainer,
    same,
)

Trained = tuple[list[StepReport], Weights]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start") / "checkpoint"
    return save_checkpoint(directory, SPEC, build_trainer_model(SPEC, seed=3).export_weights())


@pytest.fixture(scope="module")
def batches(start: Path) -> list[list[Sample]]:
    """The second is one sample: one of two ranks has an empty microbatch."""
    return [batch(1), batch(2, count=1), batch(3), batch(4), batch(5)]


@pytest.fixture(scope="module")
def alone(
    start: Path, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Trained]:
    """By whether common beginnings are computed once, as under all layouts but those that share rows."""
    return {
        shares: train(tmp_path_factory.mktemp("alone"), start, batches, 1, {}, shares=shares)
        for shares in (False, True)
    }


def train(
    directory: Path,
    start: Path,
    batches: list[list[Sample]],
    world_size: int,
    degrees: dict[str, int],
    *,
    shares: bool = True,
) -> Trained:
    """Reports of the steps, and the weights that the chain then serves."""
    request = make_request(directory, start, world_size)
    config = LearningConfig.model_validate(
        request.config.model_dump()
        | {
            "layout": degrees,
            "parity": ParityConfig(earlier_versions=0),
            "router_replay": RouterReplayConfig(),
            "packing": request.config.packing.model_copy(update={"shares_prefixes": shares}),
        }
    )
    return on_ranks(train_rank, request.model_copy(update={"config": config}), batches)


def train_rank(given: tuple[TrainerRequest, list[list[Sample]]], _: int) -> Trained:
    request, batches = given
    packing, degrees = request.config.packing, request.config.layout
    with contextlib.closing(open_trainer(request)) as trainer:
        reports = [trainer.step(samples) for samples in batches]
        is_sharing = packing.shares_prefixes and degrees.context == 1
        has_several = any(len(samples) > 1 for samples in batches)
        assert any(report.shared_ratio > 0 for report in reports) == (is_sharing and has_several)
        version = trainer.publish().version
        trainer.save()
        store = ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
        served = ChainSubscriber(store, CHAIN).fetch(version)
        assert same(served, trainer.export_weights())
    return reports, served


def check(
    reports: list[StepReport],
    weights: Weights,
    alone: dict[bool, Trained],
    start: Path,
) -> None:
    by_row, once = (alone[shares][0][-len(reports) :] for shares in (False, True))
    for seen, wanted, counted_once in zip(reports, by_row, once, strict=True):
        for name in ("loss", "gradient_norm", "reference_k1_nats", "entropy_nats"):
            assert getattr(seen, name) == pytest.approx(getattr(wanted, name), rel=1e-3, abs=1e-5)
        assert seen.sampled_tokens == wanted.sampled_tokens
        counted = counted_once if seen.shared_ratio > 0 else wanted
        assert seen.replaced_routes_ratio == pytest.approx(counted.replaced_routes_ratio, abs=1e-2)
        assert seen.mismatch_all.k3_nats == pytest.approx(wanted.mismatch_all.k3_nats, rel=1e-3)
    wanted_weights = alone[False][1]
    moved = distance(wanted_weights, load_checkpoint(start).weights)
    assert distance(weights, wanted_weights) <= 2e-3 * moved


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.sampled(1)
def test_ranks_that_share_matrices_or_rows_take_the_steps_of_one(
    tmp_path: Path, start: Path, batches: list[list[Sample]], alone: dict[bool, Trained], axis: str
) -> None:
    reports, weights = train(tmp_path, start, batches, 2, {axis: 2})
    check(reports, weights, alone, start)


@pytest.mark.nightly
def test_ranks_that_share_experts_take_them_and_ranks_that_do_not_go_on(
    tmp_path: Path, start: Path, batches: list[list[Sample]], alone: dict[bool, Trained]
) -> None:
    train(tmp_path, start, batches[:2], 2, {"expert": 2})
    reports, weights = train(tmp_path, start, batches[2:], 2, {})
    assert [report.step for report in reports] == [3, 4, 5]
    check(reports, weights, alone, start)


@pytest.mark.nightly
def test_stages_take_the_steps_of_one_rank_and_ranks_that_share_rows_go_on(
    tmp_path: Path, start: Path, batches: list[list[Sample]], alone: dict[bool, Trained]
) -> None:
    reports, _ = train(tmp_path, start, batches[:2], 2, {"pipeline": 2})
    reports += train(tmp_path, start, batches[2:3], 2, {"pipeline": 2})[0]
    for seen, wanted in zip(reports, alone[False][0], strict=False):
        assert seen.loss == pytest.approx(wanted.loss, rel=1e-3, abs=1e-5)
        assert seen.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-3)
    reports, weights = train(tmp_path, start, batches[3:], 2, {"context": 2})
    check(reports, weights, alone, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        [(1, {}), (2, {}), (4, {})],
        [(4, {"pipeline": 2, "tensor": 2}), (4, {"context": 2, "expert": 2}), (2, {"pipeline": 2})],
    ],
)
@pytest.mark.nightly
def test_run_that_changes_its_layout_takes_the_same_steps(
    tmp_path: Path,
    start: Path,
    batches: list[list[Sample]],
    alone: dict[bool, Trained],
    layouts: list[tuple[int, dict[str, int]]],
) -> None:
    """Each trainer takes up the checkpoint of the one before, and the next sample."""
    taken = []
    for turn, (ranks, degrees) in zip(([0, 1], [2, 3], [4]), layouts, strict=True):
        reports, weights = train(tmp_path, start, [batches[one] for one in turn], ranks, degrees)
        taken += reports
    assert [report.step for report in taken] == [1, 2, 3, 4, 5]
    check(taken, weights, alone, start)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_padded_microbatches_hold_the_same_tokens_in_shapes_that_turns_share(
    num_ranks: int,
) -> None:
    request = make_request(Path("unused"), Path("unused"), 1)
    samples = batch(5, count=13)
    plain = pack(samples, [1.0] * len(samples), request.config.packing)
    assert sum(one.distinct_tokens for one in plain) < sum(one.real_tokens for one in plain)
    padded = pad_to_equal_shapes(plain, num_ranks)
    assert len(padded) % num_ranks == 0
    for first in range(0, len(padded), num_ranks):
        turn = padded[first : first + num_ranks]
        assert len({one.tokens_BT.shape for one in turn}) == 1
        assert len({one.places for one in turn}) == 1
    for before, after in zip(plain, padded, strict=False):
        assert np.array_equal(before.sample_indices_B, after.sample_indices_B)
        for name in ("tokens_BT", "rollout_logprobs_BT", "routes_BTLK"):
            wanted, seen = masked(before, name), masked(after, name)
            assert np.array_equal(wanted, seen)
    assert not any(one.loss_mask_BT.any() for one in padded[len(plain) :])


def masked(batch: Microbatch, name: str) -> np.ndarray:
    return getattr(batch, name)[batch.loss_mask_BT]
