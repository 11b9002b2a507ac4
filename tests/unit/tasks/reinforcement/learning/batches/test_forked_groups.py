"""Forked groups in the loss: only what follows the branch, against the siblings, without bias."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pytest

from ostinato.infra.agent.transcript import EndReason, Segment, Transcript, TurnRecord
from ostinato.tasks.records import Branch, Group, RewardReport, Trajectory
from ostinato.tasks.reinforcement.learning.batches.credit import samples_of_step
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory

# A policy of two answers of one token each: the first has two choices, the second three.
FIRST = np.array([0.3, 0.7])
SECOND = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])
REWARDS = np.array([[1.0, -0.5, 0.25], [0.0, 2.0, 0.5]])
PLACES = (1, 3)  # of the two answers in a segment


def attempt(number: int, answers: Sequence[int], branch: Branch | None) -> Trajectory:
    tokens = np.array([9, answers[0], 9, answers[1]], dtype=np.int32)
    sampled = np.array([False, True, False, True])
    versions = np.where(sampled, 0, -1).astype(np.int64)
    segment = Segment(
        token_ids_T=tokens,
        loss_mask_T=sampled,
        logprobs_T=np.zeros(4, dtype=np.float32),
        weight_versions_T=versions,
        cache_versions_T=versions,
        routed_experts_TLK=np.zeros((4, 1, 1), dtype=np.int16),
    )
    turn = TurnRecord(generated_tokens=1, text="", calls=())
    request = AttemptRequest(f"t{number}", "g", make_problem("p"), number, retry=0, seed=0)
    reward = float(REWARDS[tuple(answers)])
    return make_trajectory(request).model_copy(
        update={
            "branch": branch,
            "reward": RewardReport(total=reward, terms={"solved": reward}),
            "transcript": Transcript(
                segments=(segment,),
                turns=(turn, turn),
                end_reason=EndReason.FINISHED,
                final_message="",
                wall_seconds=0.0,
            ),
        }
    )


def group_of(members: Sequence[Trajectory]) -> Group:
    return Group(group_id="g", problem_id="p", trajectories=tuple(members))


PARTED = Branch(turns=1)


@pytest.mark.parametrize("credit", ["trajectory", "edit"])
def test_only_what_follows_the_branch_is_trained_against_the_siblings(
    credit: Literal["trajectory", "edit"],
) -> None:
    members = [attempt(0, (0, 0), PARTED), attempt(1, (0, 1), PARTED), attempt(2, (0, 2), PARTED)]
    samples = samples_of_step([group_of(members)], ObjectiveConfig(credit=credit))
    assert [np.flatnonzero(s.segment.loss_mask_T).tolist() for s in samples] == [[3]] * 3
    assert [s.advantage for s in samples] == pytest.approx([0.75, -0.75, 0.0])
    assert all(s.segment.token_ids_T.tolist()[:3] == [9, 0, 9] for s in samples)


@pytest.mark.parametrize("credit", ["trajectory", "edit"])
def test_a_trunk_that_nothing_branched_off_counts_neither_in_loss_nor_in_mean(
    credit: Literal["trajectory", "edit"],
) -> None:
    trunk = attempt(0, (1, 1), Branch(turns=2))
    others = [attempt(1, (0, 0), None), attempt(2, (0, 1), None)]
    objective = ObjectiveConfig(credit=credit)
    samples = samples_of_step([group_of([trunk, *others])], objective)
    alone = samples_of_step([group_of(others)], objective)
    assert [(s.sample_id, s.advantage) for s in samples] == [
        (s.sample_id, s.advantage) for s in alone
    ]
    assert [s.advantage for s in samples] == pytest.approx([0.75, -0.75])


def possible_groups() -> Iterator[tuple[float, Group]]:
    """Every forked group of three with its probability. The first answer 0 is a failing test run."""
    pairs = list(itertools.product(range(2), range(3)))
    for first, second in pairs:
        chance = FIRST[first] * SECOND[first, second]
        trunk = attempt(0, (first, second), PARTED if first == 0 else Branch(turns=2))
        if first == 0:
            for rest in itertools.product(range(3), repeat=2):
                siblings = [attempt(i, (0, each), PARTED) for i, each in enumerate(rest, 1)]
                weight = chance * np.prod([SECOND[0, each] for each in rest])
                yield float(weight), group_of([trunk, *siblings])
            continue
        for rest in itertools.product(pairs, repeat=2):
            others = [attempt(i, each, None) for i, each in enumerate(rest, 1)]
            weight = chance * np.prod([FIRST[a] * SECOND[a, b] for a, b in rest])
            yield float(weight), group_of([trunk, *others])


def score(probabilities: np.ndarray, chosen: int) -> np.ndarray:
    """Gradient of the log-probability in the logits."""
    return np.eye(len(probabilities))[chosen] - probabilities


def test_the_mean_gradient_is_that_of_the_value_where_attempts_part() -> None:
    """Over all groups that can come, with their probabilities: (n - 1) grad V at the branch, and
    at the start for groups that did not branch, whose trunk does not count.
    """
    first, second = np.zeros(2), np.zeros((2, 3))
    for weight, group in possible_groups():
        for sample in samples_of_step([group], ObjectiveConfig()):
            tokens, mask = sample.segment.token_ids_T, sample.segment.loss_mask_T
            opening = int(tokens[PLACES[0]])
            if mask[PLACES[0]]:
                first += weight * sample.advantage * score(FIRST, opening)
            if mask[PLACES[1]]:
                chosen = int(tokens[PLACES[1]])
                second[opening] += weight * sample.advantage * score(SECOND[opening], chosen)
    values = (SECOND * REWARDS).sum(axis=1)
    at_branch = SECOND[0] * (REWARDS[0] - values[0])
    whole_first = FIRST * (values - FIRST @ values)
    whole_second = FIRST[:, None] * SECOND * (REWARDS - values[:, None])
    wanted = FIRST[1] * whole_second
    wanted[0] += FIRST[0] * 2 * at_branch
    np.testing.assert_allclose(first, FIRST[1] * whole_first, atol=1e-12)
    np.testing.assert_allclose(second, wanted, atol=1e-12)
