"""Disk space that a recipe's stages need, estimated from its numbers before anything starts.

The estimate is an upper bound for weights and a round figure for the rest: one seed of nano filled 0.5 GB besides
its step checkpoints.
"""

import shutil
from pathlib import Path

from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.reinforcement.learning.config import LearningConfig

_OTHER_BYTES = 1 << 30  # source archives, boxes, problem sets, logs
_WEIGHT_BYTES = 4  # fp32
_RESUME_BYTES = 16  # per parameter: weights, moments, and the copy being written
_COPIES = 3  # of a published checkpoint: run directory, object store, local copy
_TOKEN_BYTES = 8  # per token of a corpus: run directory and object store


def estimate_disk(recipe: Recipe) -> dict[str, int]:
    """Bytes that the whole chain and one running cycle need, by purpose."""
    parameters = num_parameters(recipe.model)
    runs, steps = (recipe.learning, recipe.cycle.learning), recipe.reinforcement.max_steps
    return {
        "resume points of pretraining": 2 * _RESUME_BYTES * parameters
        if recipe.pretraining.phases
        else 0,
        "step checkpoints of RL": parameters
        * sum(_checkpoint_bytes(learning, steps) for learning in runs),
        "weight chains": parameters
        * _WEIGHT_BYTES
        * sum(_kept_versions(learning, steps) for learning in runs),
        "four published checkpoints": 4 * _COPIES * _WEIGHT_BYTES * parameters,
        "corpus": _TOKEN_BYTES * sum(phase.tokens for phase in recipe.pretraining.phases),
        "everything else": _OTHER_BYTES,
    }


def _checkpoint_bytes(learning: LearningConfig, steps: int) -> int:
    """Bytes per parameter of the step checkpoints of a run and the one being written. The optimiser of adapters is small."""
    kept = steps if learning.keep_for_replay else min(learning.keep_checkpoints, steps)
    return (kept + 1) * (_RESUME_BYTES if learning.lora is None else _WEIGHT_BYTES)


def _kept_versions(learning: LearningConfig, steps: int) -> int:
    """Maximum number of versions on a chain: the kept newest ones, and those back to the full copy they build on."""
    return min(learning.keep_chain_versions + learning.anchor_every_versions, steps + 1)


def refuse_small_disk(recipe: Recipe, home: Path, run_directory: Path) -> None:
    """Raises ConfigError when the home's disk has too little free space for what the recipe has yet to write."""
    parts = estimate_disk(recipe)
    place = next(path for path in (home, *home.parents) if path.exists())
    free, needed = shutil.disk_usage(place).free, sum(parts.values())
    if free + _filled_bytes(home, run_directory) < needed:
        most = max(parts, key=lambda name: parts[name])
        raise ConfigError(
            f"recipe {recipe.name!r} may fill {needed / 1e9:.1f} GB of {place}, "
            f"{parts[most] / 1e9:.1f} GB of it {most}; {free / 1e9:.1f} GB are free. Free space, or "
            "set OSTINATO_HOME to a larger disk"
        )


def _filled_bytes(home: Path, run_directory: Path) -> int:
    """Size of the directories of the run's stages, finished or not, and of their weight chains."""
    stages = [path for path in run_directory.glob("*") if path.is_dir()]
    chains = [home / "objects" / "chains" / f"chain-{stage.name}" for stage in stages]
    files = (path for top in (*stages, *chains) for path in top.rglob("*"))
    return sum(path.lstat().st_size for path in files if path.is_file() and not path.is_symlink())
