"""Layouts of continued pretraining: losses, gradient norms and weights do not depend on them, and a run
killed in one goes on in another.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint import load_checkpoint
from ostinato.models.spec import ModelSpec
from ostinato.tasks.pretraining.config import PretrainingConfig, PretrainingRequest
from ostinato.tasks.pretraining.run import main
from tests.fakes.corpus import write_corpus
from tests.fakes.small_spec import make_spec

STEPS = 5
SHAPE = {"sequence_tokens": 64, "microbatch_tokens": 192, "global_batch_tokens": 768}
# nano's kind: sigmoid scores with a balancing bias, tied embeddings, draft layers, a dense first layer
NANO = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64, drafts=(1, 24)).model_copy(
    update={"num_dense_layers": 1, "dense_hidden_size": 48, "shared_expert_hidden_size": 16}
)
# qwen3_moe's: softmax scores, no bias, an output matrix of its own
QWEN3_MOE = make_spec(40, 32, heads=(4, 2, 8), max_sequence_tokens=64).model_copy(
    update={"router_score": "softmax", "tied_embeddings": False}
)
# deepseek_v3's: latent attention, groups of experts, a dense first layer, a shared expert
DEEPSEEK_V3 = ModelSpec.model_validate(
    {
        **QWEN3_MOE.model_dump(),
        "num_query_groups": 4,
        "head_dim": 10,
        "latent": {
            "query_rank": 12,
            "key_value_rank": 8,
            "rotary_head_dim": 4,
            "value_head_dim": 6,
            "yarn": {"factor": 4.0, "original_tokens": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "qk_norm": False,
        "router_score": "sigmoid",
        "router_groups": 2,
        "num_dense_layers": 1,
        "dense_hidden_size": 48,
        "shared_expert_hidden_size": 16,
    }
)
SPECS = {"nano": NANO, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}
# Layouts sum in another order: 1e-7 a step in fp32, times what AdamW makes of it where a gradient is
# near 0 (a step of the whole rate, 4e-3, whatever its size).
WEIGHTS = {"atol": 2e-4, "rtol": 1e-3}
FIGURES = 1e-4


class Killed(Exception):
    """Stands for the end of the process."""


class RecordingProgress(ProgressWriter):
    """Keeps losses and norms; fails after a step where told."""

    def __init__(self, directory: Path, die_at: int | None = None) -> None:
        super().__init__(directory)
        self.die_at = die_at
        self.figures: list[tuple[float, float]] = []

    def update(
        self, done: float, total: float, message: str = "", **metrics: float | int | str
    ) -> None:
        self.figures.append((float(metrics["loss"]), float(metrics["gradient_norm"])))
        if done == self.die_at:
            raise Killed


class Trained(NamedTuple):
    """Loss and gradient norm of each step, perplexity and weights at the end."""

    figures: list[tuple[float, float]]
    perplexity: float
    weights: dict[str, torch.Tensor]


def train(
    corpus: Path,
    directory: Path,
    spec: ModelSpec,
    world_size: int,
    layout: dict[str, int],
    *,
    die_at: int | None = None,
    optimizer: str = "adamw",
) -> Trained:
    phase = {"name": "bulk", "blend": {"code": (0.5, 0.5), "demonstrations": (0.5, 0.5)}}
    config: dict[str, Any] = {
        "phases": [{**phase, "tokens": SHAPE["global_batch_tokens"] * STEPS, **SHAPE}],
        "optimizer": {"kind": optimizer, "gradient_clip_norm": 1.0},
        "evaluation_row_tokens": 32,
        "evaluation_tokens": 32,  # one row: other ranks measure rows without loss
        "checkpoint_every_seconds": 0.0,
        "world_size": world_size,
        "layout": layout,
    }
    request = PretrainingRequest(
        config=PretrainingConfig.model_validate(config), corpus_directory=str(corpus), spec=spec
    )
    directory.mkdir(exist_ok=True)
    progress = RecordingProgress(directory, die_at)
    result = main(request, Workspace(directory, Settings(home=directory), progress))
    weights = load_checkpoint(Path(result.checkpoint_directory)).weights
    return Trained(progress.figures, result.after.perplexity, weights)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    directory = tmp_path_factory.mktemp("alone")
    return {name: train(corpus, directory / name, spec, 1, {}) for name, spec in SPECS.items()}


def check_equal(seen: Trained, wanted: Trained) -> None:
    for ours, theirs in zip(seen.figures, wanted.figures[-len(seen.figures) :], strict=True):
        assert ours == pytest.approx(theirs, rel=FIGURES)
    assert seen.perplexity == pytest.approx(wanted.perplexity, rel=FIGURES)
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(
            seen.weights[name], weight, **WEIGHTS, msg=lambda text, name=name: f"{name}: {text}"
        )


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"expert": 2}),
    (4, {"tensor": 2, "expert": 2}),
    (4, {"tensor": 2}),
    (4, {"expert": 2}),
]
ALWAYS = 4  # of nano's; four ranks take 12 s


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        pytest.param(
            name,
            *layout,
            marks=pytest.mark.slow if number < always else pytest.mark.nightly,
        )
        for name, always in (
            ("nano", ALWAYS),
            ("qwen3_moe", ALWAYS - 1),
            ("deepseek_v3", ALWAYS - 1),
        )
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_training_does_not_depend_on_the_layout(
    corpus: Path,
    tmp_path: Path,
    alone: dict[str, Trained],
    name: str,
    ranks: int,
    layout: dict[str, int],
) -> None:
    seen = train(corpus, tmp_path / "run", SPECS[name], ranks, layout)
    assert len(seen.figures) == STEPS
    check_equal(seen, alone[name])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layouts",
    [
        [(1, {}), (2, {"tensor": 2}), (1, {})],
        [(1, {}), (2, {"expert": 2}), (2, {})],
        pytest.param([(1, {}), (2, {}), (4, {"tensor": 2})], marks=pytest.mark.nightly),
    ],
)
def test_run_killed_in_each_layout_goes_on_in_the_next(
    corpus: Path, tmp_path: Path, alone: dict[str, Trained], layouts: list[Any]
) -> None:
    for step, (ranks, layout) in enumerate(layouts[:-1], 2):
        with pytest.raises(TrainingError, match="Killed"):
            train(corpus, tmp_path / "run", NANO, ranks, layout, die_at=step)
    seen = train(corpus, tmp_path / "run", NANO, *layouts[-1])
    assert len(seen.figures) == STEPS - 2  # the step that was reported last was not saved
    check_equal(seen, alone["nano"])


@pytest.mark.slow
def test_muon_does_not_depend_on_the_layout(corpus: Path, tmp_path: Path) -> None:
    one = train(corpus, tmp_path / "one", NANO, 1, {}, optimizer="muon")
    two = train(corpus, tmp_path / "two", NANO, 2, {"tensor": 2}, optimizer="muon")
    # orthogonalisation lifts the smallest singular values, rounding among them
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, atol=2e-3, rtol=1e-2)


def test_layout_that_does_not_fit_is_refused_before_a_rank_starts(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="wanted a divisor of the 4 ranks"):
        train(corpus, tmp_path / "ranks", NANO, 4, {"tensor": 3})
    with pytest.raises(ValueError, match="tensor=6 does not divide evaluation_row_tokens=32"):
        train(corpus, tmp_path / "rows", NANO, 6, {"tensor": 6})
    with pytest.raises(ConfigError, match="tensor=4 does not divide num_query_groups=2"):
        train(corpus, tmp_path / "heads", NANO, 4, {"tensor": 4})
    with pytest.raises(ConfigError, match="expert=8 does not divide num_experts=4"):
        train(corpus, tmp_path / "experts", NANO, 8, {"tensor": 2, "expert": 8})
