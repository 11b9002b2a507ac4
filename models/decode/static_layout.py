"""The fixed shapes a device step comes in, and how its inputs and outputs lie in one buffer each.

A step's inputs are one array of 64-bit words, its outputs one of 32-bit words, so that each crosses
to or from the device in one copy. Rows are A segments of W: a segment is a run of consecutive
positions of one slot, of which the first `lengths` are real and the others padding. It computes
nothing.

Shapes: A segments, W rows a segment, R sampled rows, L layers, K experts a token, Q draft tokens a
segment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.models.spec import ModelSpec

SMALLEST_CONTEXT = 64  # keys; a graph a power of two from here on
SMALLEST_SPAN = 16  # rows of a prompt
_WORDS_A_SEGMENT = 7  # beside its tokens


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that decides the shapes of a step; one captured graph each."""

    segments: int  # A
    width: int  # W
    context: int  # keys looked at
    samples_every_row: bool  # else after the last real row of a segment alone
    is_in_place: bool  # segment a is slot a: the cache is read where it lies, nothing is gathered
    is_limited: bool  # some row has top-k or top-p, so rows are sorted
    drafted: int = 0  # of the W tokens the last `drafted` come from the draft layers, in the step

    @property
    def rows(self) -> int:
        """Rows fed, padding included."""
        return self.segments * self.width

    @property
    def sampled(self) -> int:
        """Rows sampled, padding included."""
        return self.rows if self.samples_every_row else self.segments

    @property
    def input_words(self) -> int:
        """Length of the packed inputs."""
        return self.rows + _WORDS_A_SEGMENT * self.segments

    def output_words(self, spec: ModelSpec) -> int:
        """Length of the packed outputs."""
        routes = self.rows * spec.num_layers * spec.experts_per_token
        return 2 * self.sampled + self.segments * self.drafted + routes


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the packed inputs."""

    tokens_AW: Tensor
    slots_A: Tensor  # the scratch slot for a segment of padding
    first_A: Tensor  # position of the first row
    lengths_A: Tensor  # real rows; 0 for a segment of padding
    seed_keys_A: Tensor  # the bits of the unsigned key
    temperature_A: Tensor  # float64, which holds a float32 exactly
    top_p_A: Tensor  # float64
    top_k_A: Tensor


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Views of the packed outputs."""

    tokens_R: Tensor
    logprobs_R: Tensor
    drafts_AQ: Tensor
    routes_NLK: Tensor


def round_up(count: int, smallest: int, most: int) -> int:
    """The bucket of a count: a power of two times `smallest`, or `most`."""
    if not 0 < count <= most:
        raise ValueError(f"count is {count}, wanted 1..{most}")
    bucket = smallest
    while bucket < count:
        bucket *= 2
    return min(bucket, most)


def split_inputs(bucket: Bucket, words: Tensor) -> StepInputs:
    """Views of int64 words; writing them fills the buffer."""
    tokens, *fields = words.split([bucket.rows] + [bucket.segments] * _WORDS_A_SEGMENT)
    slots, first, lengths, seeds, temperature, top_p, top_k = fields
    return StepInputs(
        tokens_AW=tokens.view(bucket.segments, bucket.width),
        slots_A=slots,
        first_A=first,
        lengths_A=lengths,
        seed_keys_A=seeds,
        temperature_A=temperature.view(torch.float64),
        top_p_A=top_p.view(torch.float64),
        top_k_A=top_k,
    )


def split_outputs(bucket: Bucket, spec: ModelSpec, words: Tensor) -> StepOutputs:
    """Views of int32 words."""
    drafts = bucket.segments * bucket.drafted
    routes = words.numel() - 2 * bucket.sampled - drafts
    parts = words.split([bucket.sampled, bucket.sampled, drafts, routes])
    return StepOutputs(
        tokens_R=parts[0],
        logprobs_R=parts[1].view(torch.float32),
        drafts_AQ=parts[2].view(bucket.segments, bucket.drafted),
        routes_NLK=parts[3].view(bucket.rows, spec.num_layers, spec.experts_per_token),
    )


def clear_inputs(bucket: Bucket, words: Tensor, scratch_slot: int) -> StepInputs:
    """Makes every row padding, which changes nothing but the scratch slot; returns the views."""
    words.zero_()
    inputs = split_inputs(bucket, words)
    inputs.slots_A.fill_(scratch_slot)
    inputs.temperature_A.fill_(1.0)
    inputs.top_p_A.fill_(1.0)
    return inputs
