"""Publishing in a plan: bytes follow the precision, ranks share what they keep, a chain holds no more than its versions."""

import pytest

from ostinato.models.decode.config import Precision
from ostinato.models.layout import ParallelLayout
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.inputs import TrainingWork, load_inputs
from ostinato.tasks.planning.plan import estimate_step
from ostinato.tasks.planning.publishing import publish_bytes, publish_needs
from tests.fakes.small_spec import make_spec

SPEC = make_spec(4096, 512, heads=(8, 8, 64), experts=(16, 2, 256), num_layers=8)
INPUTS = load_inputs("h100")


def test_a_publish_takes_the_bytes_of_its_precision_and_in_fp32_a_delta_is_whole() -> None:
    rounded = publish_bytes(SPEC, INPUTS.costs, Precision.BF16)
    full = publish_bytes(SPEC, INPUTS.costs, Precision.FP32)

    assert rounded.anchor == 2 * num_parameters(SPEC)
    assert full.anchor == full.delta == 4 * num_parameters(SPEC)
    assert rounded.delta < rounded.anchor / 10
    assert full.delta_seconds(INPUTS) == pytest.approx(8 * full.anchor_seconds(8, INPUTS))


@pytest.mark.parametrize("precision", Precision)
def test_ranks_share_what_a_trainer_keeps_and_the_chain_ends(precision: Precision) -> None:
    published = publish_bytes(SPEC, INPUTS.costs, precision)
    one, many = (
        publish_needs(published, ranks, earlier=2, newest=8, anchor_every=25) for ranks in (1, 8)
    )

    assert one.rank_host_bytes == pytest.approx(8 * many.rank_host_bytes)
    assert one.replica_host_bytes == many.replica_host_bytes >= published.anchor
    # the newest versions, each built from at most one full copy and 25 deltas
    assert 2 * published.anchor <= one.chain_bytes <= 9 * published.anchor


def test_a_group_of_experts_within_a_domain_of_nvlink_sends_nothing_by_network() -> None:
    work = TrainingWork(
        row_tokens=4096, attended_tokens=4096, microbatch_tokens=4096, step_tokens=2**20
    )
    layout = ParallelLayout.over(16, expert=16)
    chip = load_inputs("gb200").chip
    joined, apart = (
        estimate_step(SPEC, layout, work, INPUTS.model_copy(update={"chip": one}))
        for one in (chip, chip.model_copy(update={"linked_gpus": chip.gpus_per_node}))
    )

    assert joined.sent == apart.sent
    assert joined.transfer_seconds < apart.transfer_seconds / 2
