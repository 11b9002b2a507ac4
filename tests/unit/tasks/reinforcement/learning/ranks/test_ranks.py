"""Laws of a trainer on several ranks, processes that make the same calls over gloo: it is the trainer on one rank, to
rounding; its ranks hold the same bits; its chain holds their weights.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ostinato.infra.platform.errors import StorageError, TrainingError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.manifest import list_versions, payload_key, read_manifest
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.infra.serving.weights.shard_publisher import PublisherFenced
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.network.build import build_trainer_model
from ostinato.models.training.config import LoraConfig
from ostinato.models.training.data_parallel import run_ranks
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.batches.packing import assign_to_ranks, pack
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
    RouterReplayConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.ranks import checksum_weights, gather_over_ranks
from ostinato.tasks.reinforcement.learning.report import StepReport
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.optimizer_states import State, read_state
from tests.fakes.small_spec import make_spec
from tests.unit.tasks.reinforcement.learning.samples import random_samples

pytestmark = pytest.mark.timeout(600)  # each rank is a process that imports torch and Megatron

CHAIN = "run"
# Draft layers get no gradient unless asked for: weight decay must pass them over on every number of ranks.
SPEC = make_spec(24, 16, heads=(2, 2, 8), experts=(4, 2, 8), max_sequence_tokens=64).model_copy(
    update={"mtp_depth": 1, "mtp_hidden_size": 8}
)
Weights = dict[str, torch.Tensor]
Answer = TypeVar("Answer")
# Loss, gradient norm and distance from the start of three steps, alike to these digits on one rank and on two, as the
# trainer gave them when its first rank still sent the others orders. Other processors sum in another order.
FIGURES = [
    (1.3298519, 1.2335567, 0.07584368),
    (-0.0265339, 1.9376516, 0.11807418),
    (0.7816908, 0.5454103, 0.15435992),
]


def make_request(directory: Path, start: Path, world_size: int) -> TrainerRequest:
    return TrainerRequest(
        config=LearningConfig(
            world_size=world_size,
            optimizer=PolicyOptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1),
            objective=ObjectiveConfig(
                loss_divisor_tokens=64,
                kl_coefficient=0.05,
                kl_refresh_steps=2,
                importance_cap=1.1,
                skip_zero_advantage=False,
            ),
            router_replay=RouterReplayConfig(compared_tokens=20),
            packing=PackingConfig(bucket_tokens=(16, 40), microbatch_tokens=80),
        ),
        checkpoint_directory=str(start),
        work_directory=str(directory / "work"),
        chain_id=CHAIN,
    )


def with_routes(sample: Sample, seed: int) -> Sample:
    """Routes of some other router, two experts a token; the plausibility filter will replace some. Where samples
    begin alike their routes do.
    """
    tokens_T = sample.segment.token_ids_T
    drawn = []
    for end in range(1, 1 + len(tokens_T)):
        generator = np.random.default_rng([seed, *tokens_T[:end]])
        drawn.append([generator.permutation(SPEC.num_experts)[:2] for _ in range(SPEC.num_layers)])
    routes_TLK = np.array(drawn, dtype=np.int16)
    segment = sample.segment.model_copy(update={"routed_experts_TLK": routes_TLK})
    return sample.model_copy(update={"segment": segment})


def batch(seed: int, count: int = 9) -> list[Sample]:
    samples = random_samples(build_trainer_model(SPEC, seed=3), count, seed=seed)
    return [with_routes(sample, seed) for sample in samples]


@dataclass(frozen=True)
class History:
    """What a trainer did: two steps of many samples, a refused one, one of a single sample."""

    reports: list[StepReport]
    weights: list[Weights]
    served: list[Weights]
    num_shards: list[int]
    first_moment: State
    checksums: list[set[str]]
    refusal: str
    weights_after_refusal: Weights
    saved: Weights


def open_trainer(request: TrainerRequest) -> RLTrainer:
    objects = ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
    return RLTrainer(request, objects)


def on_ranks(
    function: Callable[[Any, int], Answer], request: TrainerRequest, *given: Any
) -> Answer:
    """The first rank's answer to the function, which all run."""
    return run_ranks(function, (request, *given), request.config.parallel_layout)


def make_history(given: tuple[TrainerRequest, list[list[Sample]]], _: int) -> History:
    request, batches = given
    store = ObjectStore.from_url(f"file://{Path(request.work_directory).parent}/objects")
    subscriber = ChainSubscriber(store, CHAIN)
    infinite = [
        sample.model_copy(update={"advantage": float("inf")}) if index == 0 else sample
        for index, sample in enumerate(batches[0])
    ]
    reports, weights, served, shards, seen = [], [], [], [], []
    first_moment: State = {}
    refusal, after = "", {}
    with contextlib.closing(open_trainer(request)) as trainer:
        for index, samples in enumerate(batches):
            if index == 1:
                with pytest.raises(TrainingError, match="not changed") as refused:
                    trainer.step(infinite)
                refusal, after = str(refused.value), trainer.export_weights()
            reports.append(trainer.step(samples))
            version = trainer.publish().version
            weights.append(trainer.export_weights())
            served.append(subscriber.fetch(version))
            shards.append(read_manifest(store, CHAIN, version).num_shards)
            seen.append(set(gather_over_ranks(checksum_weights(trainer._model))))
            if index == 0:
                trainer.save()
                dist.barrier()
                state = read_state(Path(request.work_directory) / "optimizer-00000001")
                first_moment = {key: one for key, one in state.items() if "exp_avg." in key}
        saved = trainer.save()
        dist.barrier()
        kept = load_checkpoint(saved).weights
    return History(reports, weights, served, shards, first_moment, seen, refusal, after, kept)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """The checkpoint that RL begins with."""
    directory = tmp_path_factory.mktemp("start") / "checkpoint"
    return save_checkpoint(directory, SPEC, build_trainer_model(SPEC, seed=3).export_weights())


THREE = pytest.param(3, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def history_of(tmp_path_factory: pytest.TempPathFactory, start: Path) -> Callable[[int], History]:
    """By number of ranks, the same samples. The third batch is one sample: other ranks have no microbatch."""
    batches = [batch(1), batch(2), batch(3, count=1)]

    @functools.cache
    def make(ranks: int) -> History:
        request = make_request(tmp_path_factory.mktemp("history"), start, ranks)
        return on_ranks(make_history, request, batches)

    return make


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def distance(left: Weights, right: Weights) -> float:
    return float(sum((left[name] - right[name]).square().sum() for name in right) ** 0.5)


@pytest.mark.parametrize("world_size", [1, 2, THREE])
def test_steps_have_the_figures_that_they_had(history_of, start, world_size: int) -> None:
    began, history = load_checkpoint(start).weights, history_of(world_size)
    for report, weights, figures in zip(history.reports, history.weights, FIGURES, strict=True):
        seen = report.loss, report.gradient_norm, distance(weights, began)
        assert seen == pytest.approx(figures, rel=1e-4)


@pytest.mark.parametrize("world_size", [2, THREE])
def test_gradient_of_many_ranks_is_that_of_one(history_of, world_size: int) -> None:
    # AdamW's first moment after one step is the gradient times a constant.
    # fp32 sums in another order: 2e-5 of the largest element is some 200 roundings
    wanted, found = history_of(1).first_moment, history_of(world_size).first_moment
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert float((found[key] - tensor).abs().max()) <= 2e-5 * float(tensor.abs().max())


@pytest.mark.parametrize("world_size", [2, THREE])
def test_weights_of_many_ranks_are_those_of_one(history_of, start, world_size: int) -> None:
    # AdamW divides each element by its own size, so the few whose gradient is itself a rounding may move the other
    # way by a whole rate; as a share of the way all weights went together they are 1e-4 or less.
    began = load_checkpoint(start).weights
    for one, many in zip(history_of(1).weights, history_of(world_size).weights, strict=True):
        assert distance(many, one) <= 1e-3 * distance(one, began)
        drafts = [name for name in one if ".mtp." in name]
        assert drafts
        assert all(many[name].equal(began[name]) for name in drafts)


def take_steps(given: tuple[TrainerRequest, list[list[Sample]]], _: int) -> tuple[int, Weights]:
    """Number of different checksums of the ranks after the steps, and their weights."""
    request, batches = given
    with contextlib.closing(open_trainer(request)) as trainer:
        for samples in batches:
            trainer.step(samples)
        checksums = gather_over_ranks(checksum_weights(trainer._model))
        return len(set(checksums)), trainer.export_weights()


@pytest.mark.parametrize("changes", [{"lora": LoraConfig(rank=2)}, {"trains_drafts": True}])
@pytest.mark.nightly
def test_adapters_and_draft_layers_of_two_ranks_are_those_of_one(tmp_path, start, changes) -> None:
    ways, batches = [], [batch(1), batch(2)]
    for world_size in (1, 2):
        request = make_request(tmp_path / str(world_size), start, world_size)
        config = request.config.model_copy(update=changes)
        asked = request.model_copy(update={"config": config})
        different, weights = on_ranks(take_steps, asked, batches)
        assert different == 1
        ways.append(weights)
    began = load_checkpoint(start).weights
    if "trains_drafts" in changes:
        began, *ways = ({n: w for n, w in one.items() if ".mtp." in n} for one in (began, *ways))
    assert distance(ways[0], began) > 0
    assert distance(ways[1], ways[0]) <= 1e-3 * distance(ways[0], began)


@pytest.mark.parametrize("world_size", [2, THREE])
def test_report_of_many_ranks_is_that_of_one(history_of, world_size: int) -> None:
    free = {"wall_seconds", "tokens_per_second", "gradient_norm"}
    one, many = history_of(1).reports, history_of(world_size).reports
    # the first step is computed at the same weights: all but the sum over ranks has the same bits
    assert many[0].model_dump(exclude=free) == one[0].model_dump(exclude=free)
    assert 0 < one[0].replaced_routes_ratio < 1
    # the first reference is what sampled, on some processors to the bit; the third step has a fresh one
    assert abs(one[-1].reference_k1_nats) > 1e-6
    for left, right in zip(many, one, strict=True):
        rounded = pytest.approx(
            {k: v for k, v in right.metrics().items() if k not in free}, rel=1e-3, abs=1e-5
        )
        assert {k: v for k, v in left.metrics().items() if k not in free} == rounded
        assert left.gradient_norm == pytest.approx(right.gradient_norm, rel=1e-3)


@pytest.mark.parametrize("world_size", [2, THREE])
def test_ranks_hold_the_same_bits_after_each_step(history_of, world_size: int) -> None:
    seen = history_of(world_size).checksums
    assert [len(checksums) for checksums in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 3


@pytest.mark.parametrize("world_size", [1, 2, THREE])
def test_subscriber_reads_the_weights_of_the_first_rank(history_of, world_size: int) -> None:
    history = history_of(world_size)
    assert history.num_shards == [world_size] * 3
    for served, weights in zip(history.served, history.weights, strict=True):
        assert same(served, weights)
    assert same(history.saved, history.weights[-1])


@pytest.mark.parametrize("world_size", [1, 2, THREE])
def test_step_without_a_finite_gradient_is_refused_by_all_ranks(
    history_of, world_size: int
) -> None:
    history = history_of(world_size)
    assert "at step 2" in history.refusal
    assert same(history.weights_after_refusal, history.weights[0])
    assert [report.step for report in history.reports] == [1, 2, 3]


def save_first_step(given: tuple[TrainerRequest, list[list[Sample]]], _: int) -> None:
    request, batches = given
    with contextlib.closing(open_trainer(request)) as trainer:
        trainer.step(batches[0])
        trainer.publish()
        trainer.save()


def meet_failed_uploads(given: tuple[TrainerRequest, list[list[Sample]]], rank: int) -> Weights:
    """Steps 2 and 3, of which each rank fails to upload one, and a publish after another trainer took the chain."""
    request, batches = given
    home = Path(request.work_directory).parent
    store = ObjectStore.from_url(f"file://{home}/objects")
    follower = ChainSubscriber(store, CHAIN, reader_id=f"follower{rank}")
    with contextlib.closing(open_trainer(request)) as trainer:
        assert (trainer.steps_taken, trainer.weight_version) == (1, 1)  # nothing new to publish
        trainer.step(batches[1])
        blocked = home / "objects" / "chains" / CHAIN / "00000002"
        if rank == 0:
            blocked.write_text("in the way")
        dist.barrier()
        with pytest.raises(StorageError):
            trainer.publish()
        dist.barrier()
        if rank == 0:
            blocked.unlink()
        dist.barrier()
        assert trainer.publish().num_shards == 2
        assert same(follower.fetch(2), trainer.export_weights())
        trainer.step(batches[2])
        key = payload_key(CHAIN, 3, "delta", trainer._publisher._epoch, shard=1)
        if rank == 0:
            (home / "objects" / key).mkdir(parents=True)  # in the way of the second rank alone
        dist.barrier()
        with pytest.raises(StorageError, match=r"by rank \[1\]" if rank == 0 else None):
            trainer.publish()
        dist.barrier()
        if rank == 0:
            (home / "objects" / key).rmdir()
        dist.barrier()
        manifest = trainer.publish()
        assert (manifest.version, manifest.kind, manifest.base_version) == (3, "delta", 2)
        trainer.save()
        left = trainer.export_weights()
        if rank == 0:
            ChainPublisher(store, CHAIN).resume()  # a younger trainer takes over
        dist.barrier()
        trainer.step(batches[3])
        with pytest.raises(PublisherFenced if rank == 0 else StorageError):
            trainer.publish()
        assert list_versions(store, CHAIN)[-1] == 3
    return left


def test_trainer_goes_on_with_another_number_of_ranks(tmp_path: Path, start: Path) -> None:
    """One rank, then two of which each meets a failed upload and that are fenced off, then one again; the chain is
    followed through all of it.
    """
    store = ObjectStore.from_url(f"file://{tmp_path}/objects")
    one, two = make_request(tmp_path, start, 1), make_request(tmp_path, start, 2)
    batches = [batch(seed) for seed in range(4)]  # made by one rank's model, before there are two
    on_ranks(save_first_step, one, batches)
    left = on_ranks(meet_failed_uploads, two, batches)
    with contextlib.closing(open_trainer(one)) as trainer:
        assert (trainer.steps_taken, trainer.weight_version) == (3, 3)
        assert same(trainer.export_weights(), left)
        trainer.step(batches[3])
        assert trainer.publish().version == 4
        assert same(ChainSubscriber(store, CHAIN).fetch(4), trainer.export_weights())


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_each_microbatch_goes_to_one_rank_and_the_work_is_even(num_ranks: int) -> None:
    config = PackingConfig(bucket_tokens=(8, 16, 40), microbatch_tokens=80)
    samples = batch(5, count=24)
    microbatches = pack(samples, [1.0] * len(samples), config)
    shares = assign_to_ranks(microbatches, num_ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(microbatches)))
    assert all(share == sorted(share) for share in shares)
    sizes = [sum(microbatches[index].places for index in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(batch.places for batch in microbatches)
