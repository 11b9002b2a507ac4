"""Plans: parts add up to the model, more of a degree never takes more memory, what does not fit is named."""

import pytest

from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.layout import ParallelLayout
from ostinato.models.weight_shapes import num_parameters
from ostinato.tasks.planning.inputs import RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.plan import estimate_step, plan_training, search_layout
from ostinato.tasks.planning.rollouts import TERA, decode_step_seconds
from ostinato.tasks.planning.shapes import stage_parameters, token_operations
from tests.fakes.small_spec import make_spec

MODEL = make_spec(
    4096, 512, heads=(8, 8, 64), experts=(16, 2, 256), num_layers=8, max_sequence_tokens=4096
).model_copy(update={"tied_embeddings": False})
WORK = TrainingWork(
    row_tokens=4096, attended_tokens=4096, microbatch_tokens=4096, step_tokens=2**20
)
INPUTS = load_inputs("h100")


def test_stages_hold_the_whole_model() -> None:
    layout = ParallelLayout.over(4, pipeline=4)

    assert sum(held.all for held in stage_parameters(MODEL, layout)) == num_parameters(MODEL)
    assert sum(held.all for held in stage_parameters(MODEL, ParallelLayout())) == (
        num_parameters(MODEL)
    )


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline() -> None:
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    held = stage_parameters(tied, ParallelLayout.over(2, pipeline=2))

    assert sum(one.all for one in held) == num_parameters(tied) + 4096 * 512


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"expert": 4}, {"pipeline": 2}, {"context": 2}])
def test_dividing_the_model_or_the_rows_takes_no_memory(degrees: dict[str, int]) -> None:
    whole = plan_training(MODEL, ParallelLayout.over(8), WORK, INPUTS)
    part = plan_training(MODEL, ParallelLayout.over(8, **degrees), WORK, INPUTS)

    assert part.fullest.total_gib <= whole.fullest.total_gib


def test_operations_of_products_are_two_a_parameter_that_a_token_meets() -> None:
    matrices = 8 * (4 * 512 * 512 + 512 * 16 + 2 * 3 * 512 * 256) + 4096 * 512

    found = token_operations(MODEL, row_tokens=0)

    assert found.all == 2 * matrices


def test_kimi_k2_has_the_published_parameters() -> None:
    spec = load_recipe("kimi_k2").model
    assert spec is not None

    met = token_operations(spec, row_tokens=0).products + token_operations(spec, 0).grouped
    assert num_parameters(spec) == pytest.approx(1.03e12, rel=0.01)  # published as 1 T
    assert met / 2 == pytest.approx(32e9, rel=0.03)  # published as 32 B
    layout = ParallelLayout.over(64, tensor=8, pipeline=2, expert=16)
    held = stage_parameters(spec, layout)
    assert sum(one.expert for one in held) * 16 == 60 * 384 * 3 * 7168 * 2048


def test_no_step_is_faster_than_the_peak_allows() -> None:
    for layout in (ParallelLayout.over(8), ParallelLayout.over(8, tensor=2, pipeline=2)):
        step = estimate_step(MODEL, layout, WORK, INPUTS)
        assert 0 < step.mfu < INPUTS.rates.bf16_products


def test_interleaving_shrinks_the_bubble() -> None:
    plain = estimate_step(MODEL, ParallelLayout.over(8, pipeline=4), WORK, INPUTS)
    chunks = estimate_step(MODEL, ParallelLayout.over(8, pipeline=4, interleave=2), WORK, INPUTS)

    assert chunks.bubble_seconds < plain.bubble_seconds


def test_the_kind_of_memory_that_breaks_is_named() -> None:
    large = MODEL.model_copy(update={"num_layers": 48, "hidden_size": 8192})

    with pytest.raises(ConfigError, match=r"stage 0 needs .* GiB, wanted at most 79\.6: optimizer"):
        plan_training(large, ParallelLayout(), WORK, INPUTS)
    with pytest.raises(ConfigError, match="no layout of 1 GPUs fits: the smallest"):
        search_layout(large, 1, WORK, INPUTS)


def test_a_step_smaller_than_its_ranks_is_refused() -> None:
    few = WORK.model_copy(update={"step_tokens": 8192})

    with pytest.raises(ConfigError, match="data=8 leaves 1024 tokens"):
        plan_training(MODEL, ParallelLayout.over(8), few, INPUTS)


@pytest.mark.parametrize("row", [1000, 100_000])
def test_a_row_decoded_a_token_at_a_time_takes_the_operations_of_the_row(row: int) -> None:
    chip = INPUTS.chip.model_copy(update={"memory_terabytes_per_second": 1e9})
    costs = INPUTS.costs.model_copy(update={"engine_step_seconds": 0.0})
    inputs = INPUTS.model_copy(update={"chip": chip, "costs": costs})
    peak = chip.bf16_teraflops * TERA * inputs.rates.bf16_products
    work = RolloutWork(
        attempts=1,
        prompt_tokens=0,
        generated_tokens=row,
        longest_generated_tokens=row,
        tool_seconds=0,
    )

    step = decode_step_seconds(MODEL, 1, 1, work, inputs)

    assert step * peak == pytest.approx(token_operations(MODEL, row).all)


def test_a_reference_takes_the_memory_of_its_weights() -> None:
    one = plan_training(MODEL, ParallelLayout.over(2), WORK, INPUTS).fullest
    both = WORK.model_copy(update={"weight_copies": 2})
    two = plan_training(MODEL, ParallelLayout.over(2), both, INPUTS).fullest

    assert two.weights_gib == 2 * one.weights_gib
    assert two.total_gib - one.total_gib == pytest.approx(one.weights_gib)


def test_unknown_chips_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"chip 'a100'.*'b200', 'b300', 'gb200', 'gb300', 'h100', 'h200'"
    ):
        load_inputs("a100")
