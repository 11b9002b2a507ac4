"""Checkpoints on disk."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ostinato.models.checkpoint import (
    load_checkpoint,
    load_spec,
    save_checkpoint,
)
from ostinato.models.checkpoint.resume import ResumePoints, load_parts
from ostinato.models.flushing import put_all_back
from ostinato.models.layout import ParallelLayout
from ostinato.models.network.parallel.shards import sharded_parts
from ostinato.models.process_groups import open_process_groups
from ostinato.models.training.data_parallel import run_ranks
from ostinato.models.weight_shapes import weight_shapes
from tests.fakes.small_spec import SMALL_SPEC


def draw_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(SMALL_SPEC).items()
    }


def test_checkpoint_survives_saving_bit_by_bit(tmp_path: Path) -> None:
    weights, tokenizer = draw_weights(0), tmp_path / "t.json"
    tokenizer.write_text("{}")
    directory = save_checkpoint(
        tmp_path / "c",
        SMALL_SPEC,
        weights,
        tokenizer_path=tokenizer,
        metadata={"a": 1},
    )
    loaded = load_checkpoint(directory)
    assert loaded.spec == load_spec(directory) == SMALL_SPEC
    assert loaded.metadata == {"a": 1}
    assert list(loaded.weights) == list(weights)
    assert all(torch.equal(loaded.weights[name], weights[name]) for name in weights)
    assert loaded.tokenizer_path is not None
    assert loaded.tokenizer_path.read_text() == "{}"
    streamed = save_checkpoint(tmp_path / "s", SMALL_SPEC, iter(weights.items()))
    again = load_checkpoint(streamed).weights
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_save_checkpoint_replaces_an_older_one_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(0))
    save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(1))
    assert torch.equal(
        load_checkpoint(tmp_path / "c").weights["model.norm.weight"],
        draw_weights(1)["model.norm.weight"],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("done", range(6))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """`done` renamings and removals of folders happen before the kill."""
    save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(0))
    left = [done]

    def or_die(change: Callable[..., object]) -> Callable[..., object]:
        def changed(path: Path, *rest: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return change(path, *rest, **options)

        return changed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", or_die(Path.rename))
        patched.setattr(Path, "replace", or_die(Path.replace))
        patched.setattr(shutil, "rmtree", or_die(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(1))
    seen = load_checkpoint(tmp_path / "c").weights["model.norm.weight"]
    assert any(torch.equal(seen, draw_weights(seed)["model.norm.weight"]) for seed in (0, 1))
    save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(2))
    seen = load_checkpoint(tmp_path / "c").weights["model.norm.weight"]
    assert torch.equal(seen, draw_weights(2)["model.norm.weight"])
    assert not list(tmp_path.glob(".*-replaced"))


def test_all_folders_that_were_about_to_be_replaced_are_put_back(tmp_path: Path) -> None:
    for name, content in ((".a-replaced", "old"), (".b-replaced", "old"), ("b", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(content)
    put_all_back(tmp_path)
    assert [(tmp_path / name / "content").read_text() for name in ("a", "b")] == ["old", "new"]


def test_load_checkpoint_damaged_weights_are_refused(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(0))
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="has checksum"):
        load_checkpoint(directory)


def test_load_checkpoint_unfinished_directory_is_refused(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "c", SMALL_SPEC, draw_weights(0))
    (directory / "checkpoint.json").unlink()
    with pytest.raises(ValueError, match="wanted a finished checkpoint"):
        load_checkpoint(directory)


def test_save_checkpoint_misshapen_weights_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        save_checkpoint(tmp_path / "c", SMALL_SPEC, {})
    assert not list(tmp_path.iterdir())


def test_resume_point_replaces_the_last_one_and_is_only_its_own_runs(tmp_path: Path) -> None:
    open_process_groups()
    points = ResumePoints(tmp_path)
    assert points.newest("mine") is None
    for step in (1, 2):
        weight = torch.full((2, 3), float(step))
        common = {"identity": "mine", "step": step}
        points.save(f"{step:03}", sharded_parts("w", weight, weight), common)
    points.finish()
    (tmp_path / ".resume-003").mkdir()  # of a run that was killed while it wrote
    assert points.newest("another") is None
    found = points.newest("mine")
    assert found is not None
    assert found[1]["step"] == 2
    weight = torch.zeros(2, 3)
    load_parts(found[0], sharded_parts("w", weight, weight))
    assert weight.eq(2).all()
    assert [path.name for path in tmp_path.glob("resume-*")] == ["resume-002"]


def save_late_on_the_first(directory: Path, rank: int) -> tuple[bool, str]:
    """Saves two points; the first rank comes to the second one later, and cannot make the folder of a third.
    Returns whether another rank had made the second one's by then, and the error of the third on the last rank.
    """
    points = ResumePoints(directory)
    weight = torch.ones(2, 3)
    points.save("001", sharded_parts("w", weight, weight), {"identity": "mine"})
    points.finish()
    dist.barrier()
    begun_at = time.monotonic()
    was_made = False
    while rank == 0 and not was_made and time.monotonic() < begun_at + 2.0:
        time.sleep(0.01)
        was_made = (directory / ".resume-002").exists()
    points.save("002", sharded_parts("w", weight, weight), {"identity": "mine"})
    points.finish()
    seen = [was_made]
    dist.broadcast_object_list(seen)
    if seen[0]:
        return True, ""
    if rank == 0:
        (directory / ".resume-003").write_text("in the way")
    dist.barrier()
    points.save("003", sharded_parts("w", weight, weight), {"identity": "mine"})
    errors: list[str] = [""] * dist.get_world_size()
    try:
        points.finish()
    except (OSError, RuntimeError) as error:
        dist.all_gather_object(errors, str(error))
    return was_made, errors[-1]


@pytest.mark.slow
def test_folder_of_a_resume_point_is_made_by_the_first_rank_alone(tmp_path: Path) -> None:
    was_made, error = run_ranks(save_late_on_the_first, tmp_path, ParallelLayout(data=2))
    assert not was_made
    assert "rank 0 could not make" in error
    assert [path.name for path in tmp_path.glob("resume-*")] == ["resume-002"]
