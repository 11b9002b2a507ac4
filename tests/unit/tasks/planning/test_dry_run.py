"""Dry runs: a rank's part has the planned parameters, and its collectives the bytes of their tensors."""

from pathlib import Path

import pytest

from ostinato.infra.platform.cluster.workspace import ProgressWriter, Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.models.layout import ParallelLayout
from ostinato.models.spec import ModelSpec
from ostinato.models.training.optimizer_config import OptimizerConfig
from ostinato.tasks.planning.dry_run import main
from ostinato.tasks.planning.dry_run_records import DryRunRequest, DryRunResult
from ostinato.tasks.planning.inputs import TrainingWork
from tests.unit.tasks.pretraining.test_layouts import FAMILIES, SPECS

pytest_plugins = ["tests.fakes.process_groups"]
pytestmark = pytest.mark.usefixtures("closed_groups")

WORK = TrainingWork(row_tokens=64, attended_tokens=64, microbatch_tokens=128, step_tokens=1024)


def walk(
    spec: ModelSpec, directory: Path, layout: ParallelLayout, work: TrainingWork = WORK
) -> DryRunResult:
    request = DryRunRequest(spec=spec, layout=layout, work=work, optimizer=OptimizerConfig())
    workspace = Workspace(directory, Settings(home=directory), ProgressWriter(directory))
    return main(request, workspace)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(2)
def test_a_rank_of_each_stage_holds_what_the_plan_counts(name: str, tmp_path: Path) -> None:
    layout = ParallelLayout.over(8, tensor=2, expert=2, pipeline=2, context=2)

    found = walk(FAMILIES[name], tmp_path, layout)

    assert [one.built for one in found.stages] == [one.planned for one in found.stages]
    assert len(found.stages) == 2


def test_gradients_are_summed_by_the_ring_once_a_step(tmp_path: Path) -> None:
    found = walk(FAMILIES["qwen3_moe"], tmp_path, ParallelLayout.over(4))

    (stage,) = found.stages
    assert {one.phase for one in stage.exchanges} == {"gradients", "optimiser"}
    # ranks share Muon's products, and AdamW's parameters come from those that own their state
    of_optimiser = {one.operation for one in stage.exchanges if one.phase == "optimiser"}
    assert of_optimiser == {"allgather", "broadcast"}
    assert found.microbatches == 2
    sums = [one for one in stage.exchanges if one.operation.startswith("allreduce_coalesced")]
    # two all-reduces of fp32 over 4 ranks send 2 x 3/4 of the gradients' bytes; buffers are padded
    assert sum(one.sent_bytes for one in sums) == pytest.approx(1.5 * stage.weight_bytes, rel=0.05)


def test_cut_matrices_and_experts_exchange_tokens_in_every_microbatch(tmp_path: Path) -> None:
    found = walk(FAMILIES["nano"], tmp_path, ParallelLayout.over(4, tensor=2, expert=4))

    (stage,) = found.stages
    assert {one.phase for one in stage.exchanges} == {
        *("forward", "backward", "gradients", "optimiser")
    }
    for one in stage.exchanges:
        assert one.calls % found.microbatches == 0 or one.phase in ("gradients", "optimiser")
    assert {one.group_ranks for one in stage.exchanges if one.phase == "forward"} == {2, 4}


@pytest.mark.parametrize("degrees", [{"expert": 4}, {"expert": 4, "tensor": 2}])
def test_tokens_are_sent_to_their_experts_alone(tmp_path: Path, degrees: dict[str, int]) -> None:
    """A token of a rank leaves for 3/4 of its experts and comes back, twice again for gradients."""
    spec = FAMILIES["qwen3_moe"]
    layout = ParallelLayout.over(4, **degrees)

    (stage,) = walk(spec, tmp_path, layout).stages

    sent = {
        phase: sum(
            one.sent_bytes
            for one in stage.exchanges
            if one.phase == phase and one.operation.startswith("alltoall")
        )
        for phase in ("forward", "backward")
    }
    tokens = WORK.step_tokens / 4  # of a rank
    leaving = tokens * spec.experts_per_token * 3 / 4 * spec.num_layers
    states, shares = spec.hidden_size * 4, 4
    assert sent["forward"] == leaving * (2 * states + shares)
    assert sent["backward"] == sent["forward"]


@pytest.mark.parametrize(("name", "interleave"), [("nano", 1), ("nano-4", 2)])
def test_stages_send_states_forward_and_their_gradients_back(
    tmp_path: Path, name: str, interleave: int
) -> None:
    layout = ParallelLayout.over(4, pipeline=2, context=2, interleave=interleave)
    spec = SPECS[name]

    found = walk(spec, tmp_path, layout)

    states = WORK.microbatch_tokens // 2 * spec.hidden_size * 4  # fp32, of half a row
    for stage, sends in zip(found.stages, (2 * interleave - 1, 2 * interleave - 1), strict=True):
        sent = [one for one in stage.exchanges if one.phase == "pipeline"]
        assert sum(one.calls for one in sent) == sends * found.microbatches
        assert sum(one.sent_bytes for one in sent) == sends * found.microbatches * states


def test_ranks_that_share_a_row_gather_its_keys_and_values(tmp_path: Path) -> None:
    for name, width in (
        ("qwen3_moe", 2 * 2 * 8),
        ("deepseek_v3", 8 + 4),
    ):  # latent and rotated columns
        spec = FAMILIES[name]
        (stage,) = walk(spec, tmp_path, ParallelLayout.over(2, context=2)).stages

        gathered = [one for one in stage.exchanges if one.phase == "forward"]
        microbatches = WORK.step_tokens // WORK.microbatch_tokens
        rows = WORK.microbatch_tokens * microbatches * spec.num_layers
        assert sum(one.sent_bytes for one in gathered) == rows / 2 * width * 4


def test_parts_of_experts_are_built_as_planned(tmp_path: Path) -> None:
    found = walk(FAMILIES["nano"], tmp_path, ParallelLayout.over(4, expert=2, expert_tensor=2))

    (stage,) = found.stages
    assert stage.built == stage.planned
    # tokens go over ranks of expert parallelism, then over those that share an expert
    assert {one.group_ranks for one in stage.exchanges if one.phase == "forward"} == {2, 4}


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_step_of_rl_passes_each_microbatch_forward_once_more_for_its_reference(
    tmp_path: Path, pipeline: int
) -> None:
    scored = WORK.model_copy(update={"forward_passes": 1})
    layout = ParallelLayout.over(4 * pipeline, tensor=2, expert=4, pipeline=pipeline)

    found, plain = (walk(FAMILIES["nano"], tmp_path, layout, work) for work in (scored, WORK))

    for stage, before in zip(found.stages, plain.stages, strict=True):
        more = [one for one in stage.exchanges if one.phase == "log-probs"]
        assert [one for one in stage.exchanges if one not in more] == list(before.exchanges)
        of_tokens = {
            phase: sum(one.sent_bytes for one in stage.exchanges if one.phase == phase)
            for phase in ("forward", "log-probs")
        }
        sent_on = sum(one.sent_bytes for one in more if one.operation == "send")
        # besides, stages sum 16 bytes of loss and targets, which a step counts in its backward pass
        assert of_tokens["log-probs"] - sent_on == pytest.approx(of_tokens["forward"], rel=1e-3)
        assert of_tokens["forward"] > 0
        assert bool(sent_on) is (stage.stage < pipeline - 1)
