"""Draft layers that learn with the trunk through the later phases of pretraining."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.infra.platform.errors import TrainingError
from ostinato.models.network.build import build_trainer_model
from ostinato.models.training.config import LoraConfig
from ostinato.tasks.pretraining.config import PretrainingRequest, PretrainingResult
from ostinato.tasks.pretraining.mtp.config import MtpConfig
from ostinato.tasks.pretraining.mtp.run import measure_drafts
from ostinato.tasks.pretraining.run import main
from tests.fakes.corpus import write_corpus
from tests.fakes.small_spec import SMALL_SPEC
from tests.unit.tasks.pretraining.test_run import (
    InterruptingProgress,
    make_request,
    make_workspace,
    read_weights,
)

CLIPPED = {"gradient_clip_norm": 0.5}  # at every step
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cut(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainingResult:
    """The trunk after its first phase."""
    whole = make_request(corpus, optimizer=CLIPPED)
    earlier, _ = whole.config.cut_after("bulk")
    request = whole.model_copy(update={"config": earlier})
    return main(request, make_workspace(tmp_path_factory.mktemp("cut")))


def later_phases(corpus: Path, cut: PretrainingResult, **changes: Any) -> PretrainingRequest:
    _, later = make_request(corpus, optimizer=CLIPPED).config.cut_after("bulk")
    return PretrainingRequest(
        config=later,
        corpus_directory=str(corpus),
        checkpoint_directory=cut.checkpoint_directory,
        **changes,
    )


def is_equal(left: Weights, right: Weights, *, of_drafts: bool) -> bool:
    """Of the draft layers' weights, or of the trunk's."""
    names = [name for name in left if name.startswith("model.mtp.") == of_drafts]
    return all(torch.equal(left[name], right[name]) for name in names)


def measure_kl(corpus: Path, weights: Weights) -> tuple[float, ...]:
    model = build_trainer_model(SMALL_SPEC)
    model.import_weights(weights)
    phase = {"name": "unused", "blend": {"code": (1, 1)}, "tokens": 4096}
    config = MtpConfig.model_validate({"phases": [phase], "evaluation_row_tokens": 32})
    return measure_drafts(model, corpus, config, step=0).kl_nats


def test_cut_phases_are_those_of_the_whole_run(
    corpus: Path, cut: PretrainingResult, tmp_path: Path
) -> None:
    plain = main(make_request(corpus, optimizer=CLIPPED), make_workspace(tmp_path / "plain"))
    rest = main(later_phases(corpus, cut), make_workspace(tmp_path / "rest"))
    joined = cut.followed_by(rest)
    assert [(phase.name, phase.target_tokens) for phase in joined.phases] == [
        (phase.name, phase.target_tokens) for phase in plain.phases
    ]
    assert [evaluation.step for evaluation in joined.evaluations] == [0, 12, 18]
    assert joined.evaluations[:2] == plain.evaluations[:2]
    # an optimiser that begins anew at the cut
    assert joined.after.perplexity == pytest.approx(plain.after.perplexity, rel=0.1)


def test_at_weight_zero_draft_layers_learn_and_the_trunk_is_the_one_without_them(
    corpus: Path, cut: PretrainingResult, tmp_path: Path
) -> None:
    begun = read_weights(cut)
    requests = {weight: later_phases(corpus, cut, draft_weight=weight) for weight in (None, 0.0)}
    plain, beside = (
        read_weights(main(request, make_workspace(tmp_path / str(weight))))
        for weight, request in requests.items()
    )
    assert is_equal(plain, beside, of_drafts=False)
    assert is_equal(plain, begun, of_drafts=True)
    pairs = zip(measure_kl(corpus, plain), measure_kl(corpus, beside), strict=True)
    assert all(after < 0.8 * before for before, after in pairs)


@pytest.mark.nightly  # by day test_run.py continues an interrupted run
def test_joint_phases_move_the_trunk_and_a_killed_run_ends_with_the_same_weights(
    corpus: Path, cut: PretrainingResult, tmp_path: Path
) -> None:
    plain = read_weights(main(later_phases(corpus, cut), make_workspace(tmp_path / "plain")))
    request = later_phases(corpus, cut, draft_weight=0.3)
    joint = read_weights(main(request, make_workspace(tmp_path / "joint")))
    assert not is_equal(joint, plain, of_drafts=False)
    directory = tmp_path / "killed"
    directory.mkdir()
    with pytest.raises(TrainingError, match="Interrupted"):
        main(request, make_workspace(directory, InterruptingProgress(directory, at_step=3)))
    again = main(request, make_workspace(directory))
    assert again.times_resumed == 1
    ours = read_weights(again)
    assert all(is_equal(ours, joint, of_drafts=of_drafts) for of_drafts in (False, True))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sft", {}, r"a phase before the last, one of \['bulk'\]"),
        ("none", {}, r"a phase before the last, one of \['bulk'\]"),
        ("bulk", {"world_size": 2, "layout": {"tensor": 2}}, r"layout \{'tensor': 2\}"),
        ("bulk", {"world_size": 2, "layout": {"pipeline": 2}}, r"layout \{'pipeline': 2\}"),
        ("bulk", {"lora": LoraConfig(rank=2)}, r"pretraining\.lora rank=2"),
    ],
)
def test_what_draft_layers_cannot_learn_through_is_refused(
    corpus: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    config = make_request(corpus).config.model_validate(
        make_request(corpus).config.model_dump() | changes
    )
    with pytest.raises(ValueError, match=message):
        config.cut_after(name)
