"""RL on an imported dense model with grouped heads: its engine, trainer, weight chain and export agree."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.weights.subscriber import ChainSubscriber
from ostinato.models.checkpoint import load_spec
from ostinato.models.decode.engine import DecodeEngine, EngineConfig
from ostinato.models.decode.weights import prepare_weights
from ostinato.models.spec import ModelSpec
from ostinato.tasks.conversion.exporting import export_model
from ostinato.tasks.conversion.importing import import_model
from ostinato.tasks.records import Sample
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    PackingConfig,
    PolicyOptimizerConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from tests.fakes.logits import forward_logits
from tests.fakes.published_model import write_published_model
from tests.fakes.sampled_groups import sample_answers

CHAIN, LIMIT_K3 = "run", 1e-6


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/objects")


@pytest.fixture
def trainer(tmp_path: Path, objects: ObjectStore) -> Iterator[RLTrainer]:
    write_published_model(tmp_path / "in")
    import_model(str(tmp_path / "in"), tmp_path / "base", tmp_path)
    request = TrainerRequest(
        config=LearningConfig(
            optimizer=PolicyOptimizerConfig(learning_rate=1e-3, warmup_steps=0),
            objective=ObjectiveConfig(loss_divisor_tokens=64),
            packing=PackingConfig(bucket_tokens=(16, 32), microbatch_tokens=96),
        ),
        checkpoint_directory=str(tmp_path / "base"),
        work_directory=str(tmp_path / "work"),
        chain_id=CHAIN,
    )
    trainer = RLTrainer(request, objects)
    yield trainer
    trainer.close()


def sample(spec: ModelSpec, objects: ObjectStore, version: int) -> list[Sample]:
    """Answers of the compiled engine with a version's weights as the chain holds them."""
    weights = ChainSubscriber(objects, CHAIN, reader_id=f"engine{version}").fetch(version)
    config = EngineConfig(slots=8, max_context_tokens=64)
    engine = DecodeEngine(spec, prepare_weights(spec, weights, version), config)
    return sample_answers(engine, [[4, 90 + index, 7] for index in range(8)], new_tokens=24)


@pytest.mark.timeout(180)
def test_engine_trainer_and_export_of_an_imported_model_agree_over_steps(
    tmp_path: Path, trainer: RLTrainer, objects: ObjectStore
) -> None:
    start = trainer.export_weights()
    for version in range(2):
        report = trainer.step(sample(trainer.spec, objects, version))
        assert report.is_updated
        assert report.sampled_tokens == 8 * 24
        assert report.mismatch_all.k3_nats <= LIMIT_K3
        assert trainer.publish().version == version + 1
    trained = trainer.export_weights()
    assert not any(trained[name].equal(start[name]) for name in trained)

    saved = trainer.save()
    export_model(saved, tmp_path / "out", name="x", lineage=[], dtype=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens_BT = torch.from_numpy(
        np.random.default_rng(0).integers(3, trainer.spec.vocab_size, (2, 30))
    )
    with torch.no_grad():
        wanted = theirs(input_ids=tokens_BT).logits
        seen = forward_logits(trainer._model, tokens_BT)
    torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=1e-4)
    assert load_spec(saved) == trainer.spec
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
