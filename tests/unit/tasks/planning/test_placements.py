"""Placements of RL: splits stay within the GPUs, more GPUs are never slower, colocation needs no less memory."""

import functools
from itertools import pairwise

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.planning.inputs import RolloutWork, TrainingWork, load_inputs
from ostinato.tasks.planning.placements import (
    ReinforcementWork,
    RlPlacement,
    Trainers,
    colocate,
    place_colocated,
    place_separately,
    plan_trainers,
)
from ostinato.tasks.planning.plan import TrainingPlan, estimate_layouts
from tests.fakes.small_spec import make_spec

SMALL = make_spec(4096, 512, heads=(8, 8, 64), experts=(16, 2, 256), num_layers=8)
LARGE = make_spec(65_536, 4096, heads=(32, 8, 128), experts=(64, 4, 768), num_layers=48)
INPUTS = load_inputs("h100")
COUNTS = (2, 3, 4, 7, 8, 9, 16, 17, 32)
WORK = ReinforcementWork(
    training=TrainingWork(
        row_tokens=2048, attended_tokens=2048, microbatch_tokens=2048, step_tokens=2**20
    ),
    rollouts=RolloutWork(
        attempts=512,
        prompt_tokens=1024,
        generated_tokens=1024,
        longest_generated_tokens=1024,
        tool_seconds=5.0,
    ),
    steps_ahead=1,
)


@functools.cache
def layouts(spec, gpus: int) -> list[TrainingPlan]:
    return estimate_layouts(spec, gpus, WORK.training, INPUTS)


def trainers(spec, gpus: int) -> Trainers:
    return plan_trainers(gpus, 1, lambda size: layouts(spec, size))


def found(spec, place, counts=COUNTS, work=WORK) -> dict[int, RlPlacement]:
    """Placements by the number of GPUs, those that fit."""
    placements = {}
    for gpus in counts:
        try:
            placements[gpus] = place(spec, gpus, work, trainers(spec, gpus), INPUTS)
        except ConfigError:
            assert not placements, f"{gpus} GPUs do not fit, fewer do"
    assert len(placements) > 1
    return placements


@pytest.mark.parametrize("place", [place_separately, place_colocated])
@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
def test_a_placement_takes_at_most_its_gpus_and_more_gpus_are_never_slower(spec, place) -> None:
    placements = found(spec, place)
    for gpus, one in placements.items():
        assert one.gpus <= gpus
        assert one.memory_gib <= INPUTS.chip.memory_gib
        assert one.rollouts.sandboxes == 512
    seconds = [one.step_seconds for one in placements.values()]
    assert all(more <= fewer for fewer, more in pairwise(seconds))


@pytest.mark.parametrize("evaluation", [0, 1])
def test_trainer_replicas_and_evaluation_have_their_own_gpus(evaluation: int) -> None:
    work = WORK.model_copy(update={"evaluation_replicas": evaluation})
    for one in found(LARGE, place_separately, work=work).values():
        rollouts, trainer = one.rollouts, one.training.layout.world_size
        engines = (rollouts.replicas + evaluation) * rollouts.replica.gpus
        assert one.gpus == trainer + engines
        longest = max(one.training.step.seconds, rollouts.step_seconds)
        assert one.step_seconds == longest + INPUTS.costs.rl_fixed_seconds


def test_a_step_that_waits_for_its_rollouts_takes_both_times() -> None:
    waiting = WORK.model_copy(update={"steps_ahead": 0})
    one = place_separately(SMALL, 8, waiting, trainers(SMALL, 8), INPUTS)
    both = one.training.step.seconds + one.rollouts.step_seconds + one.swap_seconds
    assert one.step_seconds == pytest.approx(both + INPUTS.costs.rl_fixed_seconds)
    assert (
        one.step_seconds > place_separately(SMALL, 8, WORK, trainers(SMALL, 8), INPUTS).step_seconds
    )


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
def test_a_trainer_with_an_engine_on_its_gpus_needs_no_less_memory_than_alone(spec) -> None:
    compared = 0
    for plan in layouts(spec, 16):
        for gpus in (1, 2, 4, 8):
            if not plan.fits(INPUTS):
                continue
            try:
                one = colocate(spec, plan, gpus, WORK.rollouts, INPUTS)
            except ConfigError:
                continue
            compared += 1
            assert one.memory_gib >= plan.fullest.total_gib
            assert one.step_seconds > plan.step.seconds + one.rollouts.step_seconds
            assert one.reloads_engine or one.memory_gib > plan.fullest.total_gib
    assert compared


def test_an_engine_that_does_not_fit_beside_the_training_is_loaded_again() -> None:
    # a plan with activations in whose place the engine fits
    plan = max(layouts(LARGE, 16), key=lambda plan: plan.fullest.total_gib - 2 * plan.lasting_gib)
    chips = [
        INPUTS.chip.model_copy(update={"memory_gib": plan.fullest.total_gib + spare})
        for spare in (1, 100)
    ]
    tight, large = (INPUTS.model_copy(update={"chip": chip}) for chip in chips)

    again, kept = (colocate(LARGE, plan, 8, WORK.rollouts, one) for one in (tight, large))

    assert (again.reloads_engine, kept.reloads_engine) == (True, False)
    assert again.swap_seconds > kept.swap_seconds
    assert again.memory_gib < kept.memory_gib


def test_what_does_not_fit_is_named_with_its_number() -> None:
    with pytest.raises(ConfigError, match="1 GPU, wanted at least 2: one for the trainer"):
        place_separately(SMALL, 1, WORK, trainers(SMALL, 1), INPUTS)
    for place, most in ((place_separately, 1), (place_colocated, 2)):
        wanted = (
            rf"a trainer on at most {most} GPUs needs \d+\.\d GiB per GPU, wanted at most 79\.6"
        )
        with pytest.raises(ConfigError, match=wanted):
            place(LARGE, 2, WORK, trainers(LARGE, 2), INPUTS)
    many = WORK.model_copy(update={"evaluation_replicas": 9})
    with pytest.raises(ConfigError, match="at least 1 GPUs and its replicas 10, wanted at most 8"):
        place_separately(SMALL, 8, many, trainers(SMALL, 8), INPUTS)
    long = WORK.rollouts.model_copy(update={"prompt_tokens": 1e9})
    with pytest.raises(ConfigError, match=r"of the trainer on each, wanted .* for one attempt"):
        place_colocated(
            SMALL, 2, WORK.model_copy(update={"rollouts": long}), trainers(SMALL, 2), INPUTS
        )


def test_trainers_are_multiples_of_the_given_degrees() -> None:
    sizes = plan_trainers(35, 6, lambda size: [])
    assert sorted(sizes) == [6, 12, 18, 24, 30]
    with pytest.raises(ConfigError, match="a multiple of 6 GPUs, wanted at most 4"):
        plan_trainers(4, 6, lambda size: [])
