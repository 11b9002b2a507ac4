"""Buckets bound what they hold, and packed fields keep their values."""

from dataclasses import fields

import pytest
import torch

from ostinato.models.decode.static_layout import (
    Bucket,
    StepInputs,
    clear_inputs,
    round_up,
    split_inputs,
    split_outputs,
)
from tests.fakes.tiny_model import TINY

BUCKET = Bucket(4, 3, 64, samples_every_row=True, is_in_place=False, is_limited=False, drafted=2)


def test_a_bucket_is_the_next_power_of_two_and_never_more_than_there_is() -> None:
    assert [round_up(count, 1, 48) for count in (1, 2, 3, 5, 17, 32, 33, 48)] == [
        1, 2, 4, 8, 32, 32, 48, 48,
    ]  # fmt: skip
    assert [round_up(count, 64, 112) for count in (1, 64, 65, 112)] == [64, 64, 112, 112]
    with pytest.raises(ValueError, match=r"count is 49, wanted 1\.\.48"):
        round_up(49, 1, 48)


def test_every_input_has_a_place_of_its_own() -> None:
    words = torch.zeros(BUCKET.input_words, dtype=torch.int64)
    inputs = split_inputs(BUCKET, words)
    for number, field in enumerate(fields(StepInputs), start=1):
        getattr(inputs, field.name).fill_(number)
    again = split_inputs(BUCKET, words.clone())
    for number, field in enumerate(fields(StepInputs), start=1):
        assert (getattr(again, field.name) == number).all()
    assert int((words == 0).sum()) == 0


def test_a_rule_comes_out_with_the_bits_it_went_in_with() -> None:
    inputs = split_inputs(BUCKET, torch.zeros(BUCKET.input_words, dtype=torch.int64))
    rules_A = torch.tensor([0.1, 0.95, 1e-7, 3.4e38])
    inputs.top_p_A.numpy()[:] = rules_A.numpy()
    assert torch.equal(inputs.top_p_A.float(), rules_A)


def test_every_output_has_a_place_of_its_own() -> None:
    words = torch.full((BUCKET.output_words(TINY),), -1, dtype=torch.int32)
    outputs = split_outputs(BUCKET, TINY, words)
    outputs.tokens_R.fill_(1)
    outputs.logprobs_R.fill_(-2.5)
    outputs.drafts_AQ.fill_(3)
    outputs.routes_NLK.fill_(4)
    assert outputs.routes_NLK.shape == (12, TINY.num_layers, TINY.experts_per_token)
    assert outputs.drafts_AQ.shape == (4, 2)
    assert (outputs.tokens_R == 1).all()
    assert (outputs.logprobs_R == -2.5).all()
    assert int((words == -1).sum()) == 0


def test_cleared_inputs_are_padding() -> None:
    words = torch.full((BUCKET.input_words,), 77)
    inputs = clear_inputs(BUCKET, words, scratch_slot=9)
    assert inputs.slots_A.tolist() == [9] * 4
    assert int(inputs.lengths_A.sum()) == 0
    assert inputs.temperature_A.tolist() == inputs.top_p_A.tolist() == [1.0] * 4
