"""Turns of recorded agents, to be answered again.

Owns `load_turns`: the contexts that an agent's model answered in a run's recorded groups. Enters: a
directory of rollouts (`*.safetensors`). Leaves: prompts as token ids.
"""

from pathlib import Path

import numpy as np

from tasks.rollout.payload import group_from_bytes


def load_turns(directory: Path, count: int) -> list[tuple[int, ...]]:
    """The last recorded groups' first attempts, up to `count` contexts in order."""
    prompts: list[tuple[int, ...]] = []
    for file in sorted(directory.rglob("*.safetensors"), reverse=True):
        trajectory = group_from_bytes(file.read_bytes()).trajectories[0]
        for segment in trajectory.transcript.segments:
            mask_T = np.asarray(segment.loss_mask_T).astype(np.int8)
            starts = np.flatnonzero(np.diff(mask_T, prepend=0) == 1)
            tokens_T = np.asarray(segment.token_ids_T)
            prompts += [tuple(tokens_T[:start].tolist()) for start in starts.tolist()]
        if len(prompts) >= count:
            break
    if not prompts:
        raise ValueError(f"{directory} holds 0 recorded turns, wanted at least 1")
    return prompts[:count]
