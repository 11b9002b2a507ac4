"""`ostinato plan`: degrees are read, and a plan tells ranks, memory, time and placements."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands.plan_tables import PLANNED_ONLY, show
from ostinato.flows.commands.planning import (
    RecipePlan,
    find_mismatch,
    learning_work,
    make_plan,
    parse_bounds,
    parse_degrees,
    plan_recipe,
    pretraining_work,
)
from ostinato.flows.recipe import load_recipe
from ostinato.infra.platform.errors import ConfigError
from ostinato.models.weight_shapes import num_parameters
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


def test_a_plan_tells_both_stages_and_both_placements(priced: RecipePlan) -> None:
    shown = _shown(priced)
    separate, colocated = (
        priced.placements[name].step_seconds for name in ("separate", "colocated")
    )
    faster = f"faster: colocated, {separate / colocated:.2f} times as fast as separate"

    for part in (
        "pretraining on 16 GPUs: TP 2, CP 4, PP 1",
        "reinforcement on 8 GPUs: TP 2, CP 4, PP 1",
        "GiB per rank, of 139.8",
        "rollouts on other GPUs: replicas of 2 x 4 GPUs",
        "trainer idle",
        "a publish in fp32 moves 122.1 GB whole, 122.13 GB as a delta",
        "--set learning.publish_precision=bf16",
        "GB per trainer rank, 244.3 GB per replica; disk of versions: up to 1,099 GB",
        "steps per hour",
        "separate: a step takes",
        "colocated: a step takes",
        f"{faster}; colocated is {PLANNED_ONLY}",
    ):
        assert part in shown
    assert shown.count("MFU") == 2


def test_gpu_hours_are_steps_times_seconds_times_gpus_and_prices_follow_them(
    priced: RecipePlan,
) -> None:
    pretraining, learning = priced.hours["pretraining"], priced.hours["RL, separate"]

    assert pretraining.steps == 2500 + 25  # the transcripts' 100 steps are a quarter as large
    assert pretraining.gpu_hours == pytest.approx(
        2525 * priced.pretraining.step.seconds * 16 / 3600
    )
    separate = priced.placements["separate"]
    rollouts, gpus = separate.rollouts, separate.training.layout.world_size
    gpus += rollouts.replicas * rollouts.replica.gpus
    assert gpus <= 16
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


@pytest.mark.parametrize(("name", "gpus"), [("qwen3_30b_a3b", 16), ("kimi_k2", 512)])
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
    shown = _shown(make_plan(load_recipe("qwen3_30b_a3b"), 16, load_inputs("h100"), {}))

    assert "--set pretraining.world_size=16" in shown
    assert "--set learning.world_size=8" in shown
    assert "--set learning.layout.context=4" in shown


@pytest.mark.parametrize(
    "text",
    [
        "staleness",
        "staleness=",
        "staleness=-1",
        "age=1",
        "staleness=1,x",
        "staleness=²",
        "staleness=257",
    ],
)
def test_what_if_that_names_no_bounds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted staleness=NUMBER"):
        parse_bounds(text)


def test_what_if_without_a_separate_placement_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--what-if simulates the separate placement, which does not fit"
    ):
        plan_recipe(
            load_recipe("qwen3_30b_a3b"), 8, "h200", (), is_dry_run=False, what_if="staleness=0"
        )


def test_what_if_compares_bounds_on_staleness_with_synchronous_rollouts() -> None:
    """The same simulated run under each bound: a wider one never waits longer, and no group is older than its bound."""
    seldom = [
        "rollout.staleness.update_interval_steps=2",
        "rollout.staleness.max_staleness_versions=4",
    ]
    recipe, bounds = load_recipe("qwen3_8b", overrides=seldom), parse_bounds("staleness=0,1,4")
    plan = make_plan(recipe, 8, load_inputs("h200"), {}, bounds=bounds)
    found = list(plan.simulated.values())
    assert tuple(plan.simulated) == (0, 1, 4)
    idle = [run.trainer_idle_ratio for run in found]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] > idle[2] + 0.05
    assert found[0].staleness_mean == 0
    assert all(run.staleness_mean <= bound for bound, run in plan.simulated.items())
    shown = _shown(plan)
    assert "1.00x" in shown
    assert "What age costs, measured on nano" in shown


def test_one_placement_that_fits_makes_a_plan_and_the_other_is_named_with_its_number() -> None:
    shown = _plan(8, {})

    assert "colocated: a step takes" in shown
    assert f"rollouts on the same GPUs ({PLANNED_ONLY})" in shown
    refusal = "separate does not fit: a trainer on at most 7 GPUs needs 145.9 GiB per GPU, wanted at most 139.8"
    assert refusal in shown
    assert "engine_replicas" not in shown  # no options for what this version does not run
    assert "learning.world_size" not in shown
    assert "faster" not in shown


def test_rl_that_fits_in_no_placement_is_refused_with_both_numbers() -> None:
    recipe = load_recipe("qwen3_30b_a3b")
    wanted = r"no placement of RL fits on 8 GPUs\. Separate: .* needs 145\.9 GiB .*\. Colocated: .*71\.2 GiB of"
    with pytest.raises(ConfigError, match=wanted):
        make_plan(recipe, 8, load_inputs("h100"), {})


LADDER = (
    ("qwen3_0_6b", 1, "h100", {"colocated"}),
    ("qwen3_0_6b", 2, "h100", {"separate", "colocated"}),
    ("qwen_coder_1_5b", 1, "h100", {"colocated"}),
    ("qwen_coder_1_5b", 2, "h100", {"separate", "colocated"}),
    ("qwen3_8b", 8, "h100", {"separate", "colocated"}),
    ("qwen3_30b_a3b", 8, "h200", {"colocated"}),
    ("qwen3_30b_a3b", 8, "b300", {"separate", "colocated"}),
    ("qwen3_30b_a3b", 12, "h200", {"separate", "colocated"}),
    ("qwen3_30b_a3b", 16, "h100", {"separate", "colocated"}),
)


@pytest.mark.parametrize(("name", "gpus", "chip", "placements"), LADDER)
@pytest.mark.sampled(2)
def test_a_recipe_of_the_ladder_plans_on_its_gpus(
    name: str, gpus: int, chip: str, placements: set[str]
) -> None:
    plan = make_plan(load_recipe(name), gpus, load_inputs(chip), {})

    assert plan.placements.keys() == placements
    assert plan.pretraining.layout.world_size == gpus
    for placement in plan.placements.values():
        assert placement.gpus <= gpus
        assert placement.memory_gib <= plan.chip_memory_gib


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_0_6b", 0.596),
        ("qwen_coder_1_5b", 1.544),  # published as 1.54
        ("qwen3_8b", 8.19),  # published as 8.2
        ("qwen3_30b_a3b", 30.53),  # published as 30.5
    ],
)
def test_a_recipe_of_the_ladder_has_the_published_parameters(name: str, billions: float) -> None:
    spec = load_recipe(name).model

    assert num_parameters(spec) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "name", "gpus"),
    [
        ("reinforcement", "qwen3_0_6b", 1),
        ("continued-pretraining", "qwen_coder_1_5b", 1),
        ("reinforcement", "qwen3_8b", 8),
        ("agent-training", "qwen3_30b_a3b", 8),
    ],
)
@pytest.mark.sampled(1)
def test_a_run_of_the_ladder_can_be_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: str, name: str, gpus: int
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200\n" * gpus)

    shown = CliRunner().invoke(app, ["run", flow, "--recipe", name, "--dry-run"])

    assert shown.exit_code == 0, shown.output
    assert f"pretraining on {gpus} GPUs" in shown.output
    assert "GiB per rank, of 139.8" in shown.output
    assert "+0.00%" in shown.output
    assert not (tmp_path / "home" / "prefect").exists()
    assert not (tmp_path / "home" / "runs").exists()


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """A program of that name, first on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{names}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_chip_is_asked_of_the_machine_where_no_option_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA H100 80GB HBM3\n")
    arguments = ["plan", "--recipe", "nano", "--gpus", "1"]

    asked, given = (CliRunner().invoke(app, [*arguments, *chip]) for chip in ([], ["--chip=b300"]))

    assert "GiB per rank, of 79.6" in asked.output
    assert "GiB per rank, of 250.0" in given.output


@pytest.mark.parametrize("arguments", [["plan", "--gpus", "8"], ["run", "sft", "--dry-run"]])
def test_an_unknown_chip_names_the_known_ones_and_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA A100-SXM4-80GB\n")
    rows = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": said}))
    data = ["--data", str(rows)] if "sft" in arguments else []

    refused = CliRunner().invoke(app, [*arguments, *data])

    assert isinstance(refused.exception, ConfigError)
    assert "A100-SXM4-80GB'], wanted" in str(refused.exception).replace(";", ",")
    assert "--chip with a chip of ['b200', 'b300', 'gb200', 'gb300', 'h100', 'h200']" in str(
        refused.exception
    )
    assert not (tmp_path / "prefect").exists()


def test_a_dry_run_of_an_unknown_flow_and_gpus_of_a_real_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path))
    unknown = CliRunner().invoke(app, ["run", "demos", "--dry-run"])
    assert "no flow named demos; flows: " in str(unknown.exception)
    real = CliRunner().invoke(app, ["run", "reinforcement", "--gpus", "8"])
    assert real.exit_code == 2
    assert "describe a --dry-run" in real.output


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
    assert shown.output.count("+0.00%") == 4
    assert "dry run of reinforcement" in shown.output
    for part in ("forward", "backward", "gradients", "optimiser", "step in stage 1"):
        assert part in shown.output


def test_built_parameters_that_were_not_planned_are_named() -> None:
    assert find_mismatch([DryRunStage(stage=0, planned=1000, built=1004)]) == ""
    complaint = find_mismatch([DryRunStage(stage=1, planned=1000, built=1006)])
    assert "stage 1 holds 1,006 parameters as built and 1,000 as" in complaint


def test_too_few_gpus_are_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"needs .* GiB per rank, wanted at most 139\.8"):
        _plan(2, {})
