"""Turns of recorded agents, to be answered again.

`load_turns`: the contexts that an agent's model answered in a run's recorded groups.
A directory of rollouts (`*.safetensors`) in, prompts as token ids by problem out.
"""

from pathlib import Path

import numpy as np

from ostinato.tasks.rollout.payload import group_from_bytes


def load_turns(directory: Path, groups: slice, attempts: int) -> dict[str, list[tuple[int, ...]]]:
    """The contexts of some recorded groups by problem, of the first `attempts` at each."""
    files = sorted(directory.rglob("*.safetensors"))
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for file in files[groups]:
        group = group_from_bytes(file.read_bytes())
        turns = prompts.setdefault(group.problem_id, [])
        for trajectory in group.trajectories[:attempts]:
            for segment in trajectory.transcript.segments:
                mask_T = np.asarray(segment.loss_mask_T).astype(np.int8)
                starts = np.flatnonzero(np.diff(mask_T, prepend=0) == 1)
                tokens_T = np.asarray(segment.token_ids_T)
                turns += [tuple(tokens_T[:start].tolist()) for start in starts.tolist()]
    if not any(prompts.values()):
        raise ValueError(
            f"{directory} holds {len(files)} groups, wanted some with turns in {groups}"
        )
    return prompts
