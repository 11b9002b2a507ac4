"""Child entry of a stage that an installed package adds: the package computes weights, which are checked and saved here."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import ConfigError, TrainingError, boundary
from ostinato.models.checkpoint import OpenCheckpoint, open_checkpoint, save_checkpoint
from ostinato.models.weight_shapes import weight_shapes
from ostinato.tasks.conversion.pipeline import STAGES, OwnStageRequest, OwnStageResult


@dataclass(frozen=True, slots=True)
class StageWork:
    """The checkpoint that an added stage changes, with its settings and a folder for its files."""

    checkpoint: OpenCheckpoint
    """weights, shape and tokenizer of the stage before; weights are read from disk one at a time"""
    problems_directory: Path
    directory: Path
    """folder of this run for the stage's own files; it is kept when the run is interrupted and resumed"""
    settings: Mapping[str, Any]
    """the recipe's `[pipeline.settings.NAME]`"""
    seed: int
    progress: Callable[..., None]
    """progress(done, total, message, **metrics): shown in Prefect; metrics go to metrics.jsonl"""


OwnStage = Callable[[StageWork], Iterable[tuple[str, Tensor]]]
"""Computes the weights of the next checkpoint: name and fp32 tensor of every weight, in the order of
`checkpoint.weights`. The shape of the model stays the same.
"""


def main(request: OwnStageRequest, workspace: Workspace) -> OwnStageResult:
    """Runs the stage and saves its checkpoint with the tokenizer and metadata of the one before."""
    run = STAGES.load(request.stage_name)
    before = open_checkpoint(Path(request.checkpoint_directory))
    work = StageWork(
        checkpoint=before,
        problems_directory=Path(request.problems_directory),
        directory=workspace.directory / "own",
        settings=request.settings,
        seed=request.seed,
        progress=workspace.progress.update,
    )
    work.directory.mkdir(exist_ok=True)
    counts = torch.zeros(2, dtype=torch.int64)  # values changed, values
    with boundary(TrainingError, f"stage {request.stage_name!r}"):
        weights = _checked(run(work), before, request.stage_name, counts)
        saved = save_checkpoint(
            workspace.directory / "checkpoint",
            before.spec,
            weights,
            tokenizer_path=before.tokenizer_path,
            metadata=before.metadata,
        )
    changed, values = counts.tolist()
    return OwnStageResult(
        checkpoint_directory=str(saved),
        stage_name=request.stage_name,
        changed_ratio=changed / values,
    )


def _checked(
    weights: Iterable[tuple[str, Tensor]], before: OpenCheckpoint, stage: str, counts: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a stage, one at a time. Raises ConfigError at the first that the model cannot have."""
    given = iter(weights)
    for wanted, shape in weight_shapes(before.spec).items():
        name, tensor = next(given, ("no further weight", None))
        if name != wanted or not isinstance(tensor, Tensor):
            raise ConfigError(
                f"stage {stage!r} gave {name!r}, wanted the tensor of {wanted!r}: every weight, in the order of "
                "checkpoint.weights"
            )
        if tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"stage {stage!r} gave {name} of shape {tuple(tensor.shape)}, wanted {tuple(shape)}"
            )
        tensor = tensor.detach().float().cpu()
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"stage {stage!r} gave {name} with values that are not finite")
        counts += torch.tensor([int((tensor != before.read(name)).sum()), tensor.numel()])
        yield wanted, tensor
    if (extra := next(given, None)) is not None:
        raise ConfigError(
            f"stage {stage!r} gave {extra[0]!r} after the last weight, wanted no more"
        )
