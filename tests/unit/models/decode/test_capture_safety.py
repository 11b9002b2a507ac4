"""A CUDA graph can hold the step: proven without a GPU, on the CPU and under fake CUDA tensors."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.models.decode.static_cache import StaticCache
from ostinato.models.decode.static_layout import Bucket, clear_inputs, split_outputs
from ostinato.models.decode.static_trunk import StaticTrunk
from ostinato.models.decode.weights import Precision, map_tensors, prepare_weights
from tests.fakes.capture_rules import CaptureRules, broken_rules
from tests.fakes.tiny_model import TINY, random_weights

SLOTS, POSITIONS = 8, 96
CUDA = "cuda:0"  # with its number: torch asks a driver for the number of a bare "cuda"
# expert_hidden_size 8 and hidden_size 16 are multiples of what bf16 products need
PRECISIONS = (Precision.FP32, Precision.BF16)
WEIGHTS = {
    precision: prepare_weights(TINY, random_weights(TINY), 0, precision) for precision in PRECISIONS
}


def every_kind_of_bucket() -> list[Bucket]:
    decode = Bucket(4, 1, 64, samples_every_row=True, is_in_place=True, is_limited=False)
    kinds = [
        decode,
        dataclasses.replace(decode, width=3),
        dataclasses.replace(decode, width=3, drafted=2),
        dataclasses.replace(decode, width=16, samples_every_row=False),
    ]
    return [
        dataclasses.replace(kind, is_in_place=is_in_place, is_limited=is_limited)
        for kind, is_in_place, is_limited in itertools.product(kinds, (True, False), (True, False))
    ]


def make_step(
    bucket: Bucket, precision: Precision, device: str, *, is_grouped: bool
) -> tuple[Callable[[], None], Tensor, Tensor, StaticCache]:
    """(step, inputs, outputs, cache) with inputs that are all padding."""
    weights = WEIGHTS[precision]
    if device != "cpu":
        weights = map_tensors(weights, lambda tensor: torch.empty_like(tensor, device=device))
    cache = StaticCache(TINY, SLOTS, POSITIONS, precision.dtype, device)
    trunk = StaticTrunk(TINY, cache, device, is_grouped=is_grouped, drafts=True)
    inputs = torch.zeros(bucket.input_words, dtype=torch.int64, device=device)
    outputs = torch.zeros(bucket.output_words(TINY), dtype=torch.int32, device=device)
    clear_inputs(bucket, inputs, SLOTS)

    @torch.inference_mode()
    def step() -> None:
        trunk.run(bucket, weights, inputs, outputs)

    return step, inputs, outputs, cache


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """CUDA tensors without a device: shapes, dtypes and devices, no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(("precision", "is_grouped"), [
    (Precision.FP32, False), (Precision.BF16, True), (Precision.BF16, False),
])  # fmt: skip
def test_under_fake_cuda_nothing_leaves_the_device(precision: Precision, is_grouped: bool) -> None:
    for bucket in every_kind_of_bucket():
        step, *_ = make_step(bucket, precision, CUDA, is_grouped=is_grouped)
        assert broken_rules(step, "cuda") == [], bucket


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_the_cpu_no_value_is_read(precision: Precision) -> None:
    for bucket in every_kind_of_bucket():
        is_grouped = precision is Precision.BF16
        step, *_ = make_step(bucket, precision, "cpu", is_grouped=is_grouped)
        assert broken_rules(step, "cpu") == [], bucket


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_operations_do_not_depend_on_the_inputs(precision: Precision) -> None:
    """All padding and all real: the same operations on the same shapes, so a capture of the one is
    right for the other.
    """
    for bucket in every_kind_of_bucket():
        is_grouped = precision is Precision.BF16
        step, inputs, _, _ = make_step(bucket, precision, "cpu", is_grouped=is_grouped)
        with CaptureRules("cpu") as padding:
            step()
        views = clear_inputs(bucket, inputs, SLOTS)
        views.tokens_AW.copy_(torch.arange(bucket.rows).view_as(views.tokens_AW) % TINY.vocab_size)
        views.slots_A.copy_(torch.arange(bucket.segments))
        views.first_A.copy_(torch.tensor([0, 17, 40, 5]))
        views.lengths_A.copy_(torch.tensor([1, 2, 3, 16]).clamp(max=bucket.width))
        views.seed_keys_A.copy_(torch.tensor([-1, 2**62, 0, 9]))
        views.temperature_A.copy_(torch.tensor([0.0, 0.5, 1.0, 2.0]))
        views.top_p_A.copy_(torch.tensor([1.0, 0.9, 0.5, 1.0]))
        views.top_k_A.copy_(torch.tensor([0, 3, 0, 1]))
        with CaptureRules("cpu") as real:
            step()
        assert real.operations == padding.operations
        assert len(real.operations) > 100


def test_padding_changes_the_scratch_slot_alone() -> None:
    """So the warm-ups before a capture do no harm to sessions."""
    for bucket in every_kind_of_bucket():
        step, _, outputs, cache = make_step(bucket, Precision.FP32, "cpu", is_grouped=False)
        kept = torch.randn(cache.keys_LPCGd.shape, generator=torch.Generator().manual_seed(0))
        cache.keys_LPCGd.copy_(kept)
        cache.values_LPCGd.copy_(kept)
        step()
        for memory in (cache.keys_LPCGd, cache.values_LPCGd):
            assert torch.equal(memory[:, :SLOTS], kept[:, :SLOTS])
            assert not torch.equal(memory[:, SLOTS], kept[:, SLOTS])
        assert torch.isfinite(split_outputs(bucket, TINY, outputs).logprobs_R).all()


def test_real_rows_are_the_same_whatever_pads_them() -> None:
    """Two segments in a bucket of two and in one of eight: equal tokens and routes; log-probs to
    2e-6, since products of another height sum in another order.
    """
    drawn = []
    for segments in (2, 8):
        bucket = Bucket(
            segments, 16, 64, samples_every_row=False, is_in_place=False, is_limited=False
        )
        step, inputs, words, _ = make_step(bucket, Precision.FP32, "cpu", is_grouped=False)
        views = clear_inputs(bucket, inputs, SLOTS)
        views.tokens_AW[:2].copy_(torch.arange(32).view(2, 16))
        views.slots_A[:2].copy_(torch.tensor([6, 3]))
        views.lengths_A[:2].copy_(torch.tensor([16, 5]))
        step()
        drawn.append(split_outputs(bucket, TINY, words))
    small, large = drawn
    assert torch.equal(small.tokens_R, large.tokens_R[:2])
    torch.testing.assert_close(small.logprobs_R, large.logprobs_R[:2], atol=2e-6, rtol=0)
    assert torch.equal(small.routes_NLK[:21], large.routes_NLK[:21])


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize(
    ("sin", "words"),
    [
        (lambda values: values.sum().item(), "_local_scalar_dense.default is read by the host"),
        (lambda values: values.tolist(), "_local_scalar_dense.default is read by the host"),
        (
            lambda values: 1 if values.any() else 0,
            "_local_scalar_dense.default is read by the host",
        ),
        (lambda values: values.unique(), "_unique2.default is read by the host"),
        (lambda values: values.long().bincount(), "bincount.default is read by the host"),
        (lambda values: values.cpu(), "touches cpu"),
        (lambda values: values + torch.arange(4), "touches cpu"),
        (lambda values: values * torch.tensor(2.0), "touches cpu"),
        (lambda values: values + torch.tensor([1.0] * 4, device=CUDA), "touches cpu"),
        (lambda values: values.numpy(), ".numpy() is not supported"),
    ],
)
def test_the_check_sees_what_a_graph_cannot_hold(
    sin: Callable[[Tensor], object], words: str
) -> None:
    values = torch.zeros(4, device=CUDA)
    assert broken_rules(lambda: values * 2 + values.sum(), "cuda") == []
    assert any(words in line for line in broken_rules(lambda: sin(values), "cuda"))


@pytest.mark.parametrize(
    "sin", [lambda values: values.nonzero(), lambda values: values[values > 0]]
)
def test_the_check_sees_shapes_that_depend_on_values(sin: Callable[[Tensor], object]) -> None:
    lines = broken_rules(lambda: sin(torch.ones(4)), "cpu")
    assert any("is read by the host" in line for line in lines)
