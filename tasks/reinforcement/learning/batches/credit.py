"""Credit per edit: the tokens that lead to an edit get an advantage of their own.

The tokens up to the first edit are one part, those from there to the second edit the next, and so
on. The return of part k is the reward; a positive reward is multiplied by the discount once for each
later edit. The baseline is the mean return of part k over the group's trajectories that reached it.
This follows turn-level credit (Zeng et al. 2025, arXiv:2505.11821) and step-level groups (GiGPO,
Feng et al. 2025, arXiv:2505.10978); the division into parts by edits is ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ostinato.infra.agent.dialects.full.tools import EDIT_TOOLS
from ostinato.infra.agent.transcript import CallStatus, Segment, Transcript, TurnRecord
from ostinato.tasks.records import Group, Sample
from ostinato.tasks.reinforcement.learning.batches.advantages import (
    center_rewards,
    cut_loss,
    make_sample,
    make_samples,
    trained_members,
    trained_segments,
)
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig


def samples_of_step(groups: Iterable[Group], objective: ObjectiveConfig) -> list[Sample]:
    """Samples of a step's groups, ordered by group id because float sums depend on the order."""
    samples: list[Sample] = []
    for group in sorted(groups, key=lambda group: group.group_id):
        if objective.credit == "edit":
            samples += make_edit_samples(group, objective.edit_discount)
        else:
            samples += make_samples(group, objective)
    return samples


def make_edit_samples(group: Group, discount: float) -> tuple[Sample, ...]:
    """One sample per part and segment. Only the tokens of the part carry loss."""
    members = trained_members(group)
    parts = [
        list(split_by_edits(member.transcript)) or [(0, 0, trained_segments(member)[0])]
        for member in members
    ]
    returns: dict[int, dict[int, float]] = defaultdict(dict)  # part -> trajectory -> return
    for index, member in enumerate(members):
        edits = sum(map(is_edit, member.transcript.turns))
        for part in range(1 + max(part for _, part, _ in parts[index])):
            later = max(0, edits - 1 - part)  # after the last edit there is a part without one
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
            number,
            cut_loss(member, number, segment),
            advantages[part, index] + member.reward.of_segment(number),
            f".{part}",
        )
        for index, member in enumerate(members)
        for number, part, segment in parts[index]
    )


def split_by_edits(transcript: Transcript) -> Iterator[tuple[int, int, Segment]]:
    """Yields (number of the segment, edits before the part, segment with loss on this part only)."""
    edits = 0
    masks: dict[tuple[int, int], np.ndarray] = {}
    for number, start, end, turn in sampled_ranges(transcript):
        mask_T = np.zeros_like(transcript.segments[number].loss_mask_T)
        masks.setdefault((number, edits), mask_T)[start:end] = True
        edits += turn is not None and is_edit(turn)
    for (number, part), part_T in masks.items():
        yield number, part, transcript.segments[number].model_copy(update={"loss_mask_T": part_T})


def sampled_ranges(transcript: Transcript) -> Iterator[tuple[int, int, int, TurnRecord | None]]:
    """Yields (number of the segment, first token, end, turn) of each range of sampled tokens."""
    turns = iter([turn for turn in transcript.turns if turn.generated_tokens])
    for number, segment in enumerate(transcript.segments):
        mask_T = np.asarray(segment.loss_mask_T).astype(np.int8)
        edges = np.flatnonzero(np.diff(mask_T, prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            yield number, start, end, next(turns, None)


def is_edit(turn: TurnRecord) -> bool:
    """Whether a call of the turn edited a file."""
    return any(call.tool in EDIT_TOOLS and call.status is CallStatus.OK for call in turn.calls)
