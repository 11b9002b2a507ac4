"""Checkpoints on a disk that fills up at each of their writes: `python -m tests.faults.full_disk_program PART DIRECTORY`.

DIRECTORY is a small disk of its own. Each write of a checkpoint is tried with one more page of room until it succeeds.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.errors import StorageError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.models.checkpoint.resume import ResumePoints, load_parts
from ostinato.models.network.build import build_trainer_model
from ostinato.models.network.parallel.shards import sharded_parts
from ostinato.models.process_groups import open_process_groups
from ostinato.tasks.pretraining.config import PretrainingResult
from ostinato.tasks.reinforcement.learning.step_checkpoints import StepCheckpoints, StepState
from tests.fakes.corpus import write_corpus
from tests.fakes.small_spec import SMALL_SPEC
from tests.faults.test_pretraining_kill import ENTRY, make_request

PAGE_BYTES = 4096
FILLER = "filler"


def leave(home: Path, pages: int) -> None:
    """Fills the disk until so many pages are free."""
    filler = home / FILLER
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(PAGE_BYTES))
    size = filler.stat().st_size // PAGE_BYTES * PAGE_BYTES
    assert size >= pages * PAGE_BYTES, f"the disk has no {pages} pages of room at all"
    with filler.open("rb+") as file:
        file.truncate(size - pages * PAGE_BYTES)


def refusal(call: Callable[[], object]) -> str | None:
    """What a full disk made it say. None when it succeeded."""
    try:
        call()
    except StorageError as error:
        return str(error)
    return None


def check_writes(home: Path, write: Callable[[], object], check: Callable[[], None]) -> int:
    """Writes with ever more room. Each failure is typed, names the disk and leaves what was there. Their number."""
    pages = 0
    while True:
        leave(home, pages)
        said = refusal(write)
        if said is None:
            return pages
        assert str(home) in said, said
        assert "No space left on device" in said, said
        check()
        (home / FILLER).unlink()
        assert not list(home.rglob(".*-*")), "a part of a checkpoint was left behind"
        pages += 1


def resume_points(home: Path) -> int:
    """Of pretraining and draft layers."""
    open_process_groups()
    points = ResumePoints(home)

    def save(step: int) -> None:
        weight = torch.full((50_000,), float(step))
        points.save(f"{step:03}", sharded_parts("w", weight, weight), {"identity": "run"})
        points.finish()

    def check(step: int = 1) -> None:
        found = points.newest("run")
        assert found is not None
        weight = torch.empty(50_000)
        load_parts(found[0], sharded_parts("w", weight, weight))
        assert weight.eq(step).all()

    def write() -> None:
        with boundary(StorageError, "saving"):
            save(2)

    save(1)
    failures = check_writes(home, write, check)
    check(2)
    return failures


def steps(home: Path) -> int:
    """Of RL: weights, optimiser, reference."""
    model = build_trainer_model(SMALL_SPEC, seed=0)
    weights = model.export_weights()
    moments = torch.ones(30_000)
    checkpoints = StepCheckpoints(home / "work", None, keep=2, num_ranks=1)

    def save(step: int) -> Path:
        state = StepState(step=step, weight_version=step, reference_step=step - 1)
        return checkpoints.save(state, model, sharded_parts("moments", moments, moments), model)

    def check(step: int = 1) -> None:
        found = checkpoints.find_newest()
        assert found is not None
        assert found.state.step == step
        loaded = torch.zeros_like(moments)
        load_parts(found.parts, sharded_parts("moments", loaded, loaded))
        assert torch.equal(loaded, moments)
        assert found.reference is not None
        assert all(torch.equal(found.weights.read(name), weights[name]) for name in weights)

    save(1)
    failures = check_writes(home, lambda: save(2), check)
    check(2)
    return failures


def stage(home: Path) -> int:
    """Pretraining in its child: it ends where the disk is full, and goes on where it was when there is room."""
    request = make_request(write_corpus(home / "corpus"))
    settings = Settings(home=home)

    def run() -> PretrainingResult:
        return run_child(
            ENTRY, request, PretrainingResult, directory=home / "work", settings=settings
        )

    failures = 0
    for pages in (0, 24, 64):  # no child starts; its first files; the first resume points
        leave(home, pages)
        said = refusal(run)
        if said is not None:
            assert str(home) in said, said
            assert "No space left on device" in said or "the disk there is full" in said, said
            failures += 1
        (home / FILLER).unlink()
    assert run().phases[-1].steps == 50
    return failures


if __name__ == "__main__":
    parts = {"resume_points": resume_points, "steps": steps, "stage": stage}
    print(parts[sys.argv[1]](Path(sys.argv[2])))  # noqa: T201
