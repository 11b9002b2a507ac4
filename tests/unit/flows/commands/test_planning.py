"""`ostinato plan`: degrees are read, and a plan tells ranks, memory, time and replicas."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands.planning import (
    RecipePlan,
    find_mismatch,
    learning_work,
    make_plan,
    parse_degrees,
    pretraining_work,
    show,
)
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.planning.dry_run_records import DryRunStage
from ostinato.tasks.planning.inputs import load_inputs
from ostinato.tasks.planning.plan import search_layout


def _plan(gpus: int, degrees: dict[str, int], name: str = "qwen3_30b_a3b") -> str:
    return _shown(make_plan(load_recipe(name), gpus, load_inputs("h200"), degrees))


def test_degrees_are_axes_with_numbers() -> None:
    assert parse_degrees(["tensor=2", "expert=8"]) == {"tensor": 2, "expert": 8}
    for wrong in ("data=2", "tensor", "tensor=0", "tensor=two"):
        with pytest.raises(ConfigError, match=f"--layout '{wrong}', wanted AXIS=NUMBER"):
            parse_degrees([wrong])


@pytest.fixture(scope="module")
def priced() -> RecipePlan:
    """A plan on 16 GPUs whose hours cost 2."""
    degrees = {"tensor": 2, "context": 4, "expert": 8}
    return make_plan(load_recipe("qwen3_30b_a3b"), 16, load_inputs("h200"), degrees, price=2.0)


def _shown(plan: RecipePlan) -> str:
    text = io.StringIO()
    show(plan, Console(file=text, width=160))
    return text.getvalue()


def test_a_plan_tells_both_stages_and_the_replicas(priced: RecipePlan) -> None:
    shown = _shown(priced)

    for part in (
        "pretraining: TP 2, CP 4, PP 1",
        "reinforcement: ",
        "GiB per rank, of 139.8",
        "replicas of",
        "trainer idle",
    ):
        assert part in shown
    assert shown.count("MFU") == 2


def test_gpu_hours_are_steps_times_seconds_times_gpus_and_prices_follow_them(
    priced: RecipePlan,
) -> None:
    pretraining, learning = priced.hours["pretraining"], priced.hours["reinforcement"]

    assert pretraining.steps == 2500 + 25  # the transcripts' 100 steps are a quarter as large
    assert pretraining.gpu_hours == pytest.approx(
        2525 * priced.pretraining.step.seconds * 16 / 3600
    )
    gpus = 16 + priced.rollouts.replicas * priced.rollouts.replica.gpus
    steps = load_recipe("qwen3_30b_a3b").reinforcement.max_steps
    assert (learning.steps, learning.gpus) == (steps, gpus)
    assert learning.gpu_hours == pytest.approx(steps * learning.step_seconds * gpus / 3600)
    assert learning.price == pytest.approx(2 * learning.gpu_hours)

    total = pretraining.gpu_hours + learning.gpu_hours
    free = {name: one.model_copy(update={"price": None}) for name, one in priced.hours.items()}
    for plan in (priced, priced.model_copy(update={"hours": free})):
        shown, has_price = _shown(plan), plan is priced
        assert f"{total:,.1f}" in shown
        assert ("price" in shown) is has_price
        assert (f"{2 * total:,.2f}" in shown) is has_price


@pytest.mark.parametrize(("name", "gpus"), [("qwen3_30b_a3b", 16), ("kimi_k2", 256)])
@pytest.mark.nightly
def test_the_options_of_a_plan_are_taken_by_the_recipe(name: str, gpus: int) -> None:
    options = [line for line in _plan(gpus, {}, name).splitlines() if line.startswith("--set")]
    overrides = [part for line in options for part in line.split() if part != "--set"]

    recipe = load_recipe(name, overrides=overrides)

    assert len(options) == 2
    assert recipe.pretraining.parallel_layout.world_size == gpus
    assert recipe.learning.parallel_layout.is_cut


@pytest.mark.nightly
def test_rl_takes_the_axes_that_pretraining_has_where_it_fits_no_other_way() -> None:
    text = io.StringIO()
    console = Console(file=text, width=160)
    show(make_plan(load_recipe("qwen3_30b_a3b"), 8, load_inputs("h100"), {}), console)
    shown = text.getvalue()

    assert "--set pretraining.world_size=8" in shown
    assert "--set learning.world_size=8" in shown
    assert "--set learning.layout.context=4" in shown


@pytest.mark.parametrize(("gpus", "needed"), [(8, 2183.0), (64, 289.9)])
def test_kimi_k2_on_few_gpus_is_refused_with_what_a_rank_would_need(
    gpus: int, needed: float
) -> None:
    refusal = (
        rf"no layout of {gpus} GPUs fits: .* needs {needed} GiB per rank, wanted at most 139\.8"
    )
    with pytest.raises(ConfigError, match=refusal):
        _plan(gpus, {}, "kimi_k2")


CHIPS = {"h100": 79.6, "h200": 139.8, "b300": 250.0}
COUNTS = (8, 16, 64, 256, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chip", "first"),
    [
        *(("qwen3_30b_a3b", chip, 8) for chip in CHIPS),
        ("kimi_k2", "h100", 1024),
        ("kimi_k2", "h200", 256),
        ("kimi_k2", "b300", 256),
    ],
)
@pytest.mark.nightly
def test_a_recipe_fits_from_a_number_of_gpus_on_and_below_it_the_memory_is_named(
    name: str, chip: str, first: int
) -> None:
    recipe, inputs = load_recipe(name), load_inputs(chip)
    for work in (pretraining_work(recipe), learning_work(recipe)):
        for gpus in COUNTS:
            if gpus < first:
                wanted = (
                    rf"no layout of {gpus} GPUs fits: .* GiB per rank, wanted at most {CHIPS[chip]}"
                )
                with pytest.raises(ConfigError, match=wanted):
                    search_layout(recipe.model, gpus, work, inputs)
                continue
            plan = search_layout(recipe.model, gpus, work, inputs)
            assert plan.layout.world_size == gpus
            assert plan.fullest.total_gib <= inputs.chip.memory_gib


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "parts"),
    [("qwen3_30b_a3b", 32, ("send",)), ("kimi_k2", 512, ("alltoall", "allgather"))],
)
@pytest.mark.nightly
def test_cluster_recipes_are_planned_built_and_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, parts: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    arguments = ["plan", "--recipe", name, "--gpus", str(gpus), "--chip", "h200", "--dry-run"]

    shown = CliRunner().invoke(app, arguments)

    assert shown.exit_code == 0, shown.output
    assert "+0.00%" in shown.output
    for part in ("forward", "backward", "gradients", "optimiser", *parts):
        assert part in shown.output


@pytest.mark.slow
def test_a_dry_run_builds_what_was_planned_and_tells_what_a_rank_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    arguments = ["plan", "--recipe", "nano", "--gpus", "8", "--chip", "h200", "--dry-run"]
    axes = ("tensor=2", "expert=2", "expert_tensor=2", "pipeline=2")
    layout = [part for axis in axes for part in ("--layout", axis)]

    shown = CliRunner().invoke(app, [*arguments, *layout])

    assert shown.exit_code == 0, shown.output
    assert shown.output.count("+0.00%") == 2
    for part in ("forward", "backward", "gradients", "optimiser", "step in stage 1"):
        assert part in shown.output


def test_built_parameters_that_were_not_planned_are_named() -> None:
    assert find_mismatch([DryRunStage(stage=0, planned=1000, built=1004)]) == ""
    complaint = find_mismatch([DryRunStage(stage=1, planned=1000, built=1006)])
    assert "stage 1 holds 1,006 parameters as built and 1,000 as" in complaint


def test_too_few_gpus_are_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB per rank, wanted at most 139\.8"):
        _plan(2, {})
