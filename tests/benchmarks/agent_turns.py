"""Turns of recorded agents, to be answered again.

Owns `load_turns`: the contexts that an agent's model answered in a run's recorded groups. Enters: a
directory of rollouts (`*.safetensors`). Leaves: prompts as token ids.
"""

from pathlib import Path

import numpy as np

from tasks.rollout.payload import group_from_bytes


def load_turns(directory: Path, groups: slice, attempts: int) -> list[tuple[int, ...]]:
    """The contexts of some recorded groups in order, of the first `attempts` at each."""
    files = sorted(directory.rglob("*.safetensors"))
    prompts: list[tuple[int, ...]] = []
    for file in files[groups]:
        for trajectory in group_from_bytes(file.read_bytes()).trajectories[:attempts]:
            for segment in trajectory.transcript.segments:
                mask_T = np.asarray(segment.loss_mask_T).astype(np.int8)
                starts = np.flatnonzero(np.diff(mask_T, prepend=0) == 1)
                tokens_T = np.asarray(segment.token_ids_T)
                prompts += [tuple(tokens_T[:start].tolist()) for start in starts.tolist()]
    if not prompts:
        raise ValueError(
            f"{directory} holds {len(files)} groups, wanted some with turns in {groups}"
        )
    return prompts
