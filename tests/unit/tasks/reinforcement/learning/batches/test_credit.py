"""Credit per edit: every token once, and an edit is compared with the same edit of the others."""

import numpy as np
import pytest

from ostinato.infra.agent.transcript import Transcript, TurnRecord
from ostinato.tasks.records import Group, Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import make_samples
from ostinato.tasks.reinforcement.learning.batches.credit import make_edit_samples, split_by_edits
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_segment, make_trajectory
from tests.fakes.transcripts import make_call

PLAIN = ObjectiveConfig()


def attempt(index: int, edits: int, *, solved: bool, has_last_word: bool = True) -> Trajectory:
    """`edits` turns of one edit each and a last word, two tokens a turn."""
    request = AttemptRequest(f"t{index}", "g", make_problem("p"), index, 0, 1)
    segment = make_segment([0] * (3 * edits + 2))
    mask_T = segment.loss_mask_T.copy()
    mask_T[5::3] = False  # a result after every turn
    segment = segment.model_copy(update={"loss_mask_T": mask_T})
    turns = [TurnRecord(generated_tokens=2, text="", calls=(make_call("edit_file"),))] * edits
    turns.append(TurnRecord(generated_tokens=2, text="Done.", calls=()))
    if not has_last_word:
        segment = segment.model_copy(
            update={"loss_mask_T": mask_T & (np.arange(len(mask_T)) < 3 * edits + 3)}
        )
        turns.pop()
    made = make_trajectory(request, solved=solved)
    new = {"segments": (segment,), "turns": tuple(turns)}
    return made.model_copy(update={"transcript": made.transcript.model_copy(update=new)})


def parts_of(transcript: Transcript) -> np.ndarray:
    return np.stack([segment.loss_mask_T for _, _, segment in split_by_edits(transcript)])


@pytest.mark.parametrize("edits", [0, 1, 3])
def test_parts_hold_every_sampled_token_once(edits: int) -> None:
    transcript = attempt(0, edits, solved=True).transcript
    masks = parts_of(transcript)
    assert len(masks) == edits + 1
    assert np.array_equal(masks.sum(axis=0), transcript.segments[0].loss_mask_T)


def test_a_wrong_first_edit_of_a_solved_attempt_is_worth_less_than_a_right_one() -> None:
    group = Group(
        group_id="g",
        problem_id="p",
        trajectories=(
            attempt(0, 1, solved=True),
            attempt(1, 3, solved=True),
            attempt(2, 1, solved=False),
        ),
    )
    first = {
        sample.trajectory_id: sample.advantage
        for sample in make_edit_samples(group, 0.5)
        if sample.sample_id.endswith(".0")
    }
    mean = (1 + 0.25 + 0) / 3
    assert first == pytest.approx({"t0": 1 - mean, "t1": 0.25 - mean, "t2": -mean})
    plain = {sample.trajectory_id: sample.advantage for sample in make_samples(group, PLAIN)}
    assert plain["t0"] == plain["t1"] > 0 > first["t1"]


def test_attempt_that_ends_with_an_edit_has_the_returns_of_one_with_a_last_word() -> None:
    """As at a limit of turns: every edit but the last one was followed by another."""
    ends = (attempt(0, 2, solved=True), attempt(1, 2, solved=True, has_last_word=False))
    group = Group(group_id="g", problem_id="p", trajectories=(*ends, attempt(2, 1, solved=False)))
    samples = {sample.sample_id: sample.advantage for sample in make_edit_samples(group, 0.5)}
    assert samples["t0/0.0"] == samples["t1/0.0"] == pytest.approx(0.5 - (0.5 + 0.5 + 0) / 3)
    assert samples["t0/0.1"] == samples["t1/0.1"] == pytest.approx(1 - (1 + 1 + 0) / 3)


def test_without_discount_and_with_equal_edits_it_is_trajectory_credit() -> None:
    group = Group(
        group_id="g",
        problem_id="p",
        trajectories=(attempt(0, 2, solved=True), attempt(1, 2, solved=False)),
    )
    plain = {sample.trajectory_id: sample.advantage for sample in make_samples(group, PLAIN)}
    for sample in make_edit_samples(group, 1.0):
        assert sample.advantage == plain[sample.trajectory_id]
