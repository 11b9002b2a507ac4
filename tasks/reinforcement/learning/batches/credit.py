"""Credit per edit: the tokens that lead to an edit are credited with what came of it.

The tokens up to the first edit, from there to the second, and so on are parts of their own. The
return of part k is the reward, less by a factor for each later edit when it is positive; its
baseline is the mean return of part k over the group's trajectories that reached it. After
turn-level credit (Zeng et al. 2025, arXiv:2505.11821) and step-level groups (GiGPO, Feng et al.
2025, arXiv:2505.10978); the parts by edits are ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.transcript import CallStatus, Segment, Transcript
from ostinato.tasks.records import Group, Sample
from ostinato.tasks.reinforcement.learning.batches.advantages import (
    center_rewards,
    cut_loss,
    make_sample,
    make_samples,
    trained_members,
)
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig


def samples_of_step(groups: Iterable[Group], objective: ObjectiveConfig) -> list[Sample]:
    """Samples of a step's groups, in the order of the groups' names: a sum of floats depends on it."""
    samples: list[Sample] = []
    for group in sorted(groups, key=lambda group: group.group_id):
        if objective.credit == "edit":
            samples += make_edit_samples(group, objective.edit_discount)
        else:
            samples += make_samples(group, objective)
    return samples


def make_edit_samples(group: Group, discount: float) -> tuple[Sample, ...]:
    """One sample per part and segment. A part's tokens alone carry its loss."""
    members = trained_members(group)
    parts = [list(split_by_edits(member.transcript)) for member in members]
    returns: dict[int, dict[int, float]] = defaultdict(dict)  # part -> trajectory -> return
    for index, member in enumerate(members):
        last = max((part for _, part, _ in parts[index]), default=0)
        for part in range(last + 1):
            # the last part holds no edit of its own unless it is the only one
            later = max(0, last - 1 - part)
            reward = member.reward.total
            returns[part][index] = reward * discount**later if reward > 0 else reward
    advantages = {
        (part, index): advantage
        for part, reached in returns.items()
        for index, advantage in zip(reached, center_rewards(list(reached.values())), strict=True)
    }
    return tuple(
        make_sample(
            group,
            member,
            f"{number}.{part}",
            cut_loss(member, number, segment),
            advantages[part, index],
        )
        for index, member in enumerate(members)
        for number, part, segment in parts[index]
    )


def split_by_edits(transcript: Transcript) -> Iterator[tuple[int, int, Segment]]:
    """(number of the segment, edits before the part, segment with the loss on the part alone)."""
    turns = iter([turn for turn in transcript.turns if turn.generated_tokens])
    edits = 0
    for number, segment in enumerate(transcript.segments):
        mask_T = np.asarray(segment.loss_mask_T)
        edges = np.flatnonzero(np.diff(mask_T.astype(np.int8), prepend=0, append=0))
        masks: dict[int, np.ndarray] = {}
        for start, end in edges.reshape(-1, 2).tolist():
            masks.setdefault(edits, np.zeros_like(mask_T))[start:end] = True
            turn = next(turns, None)
            if turn is not None:
                edits += any(
                    call.tool in EDIT_TOOLS and call.status is CallStatus.OK for call in turn.calls
                )
        for part, part_T in masks.items():
            yield number, part, segment.model_copy(update={"loss_mask_T": part_T})
