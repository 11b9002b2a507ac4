"""Power is lost at each flush to the disk, which keeps nothing else: what was promised is there, the rest is whole or absent."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from ostinato.infra.platform.artifacts import Artifacts
from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.checkpoint.resume import ResumePoints, load_parts
from ostinato.models.network.build import build_trainer_model
from ostinato.models.network.parallel.shards import sharded_parts
from ostinato.models.process_groups import open_process_groups
from tests.fakes.lossy_disk import LossyDisk, PowerLost
from tests.fakes.small_spec import SMALL_SPEC

Write = Callable[[Path], object]
Check = Callable[[Path], object]


def lose_power_everywhere(tmp_path: Path, write: Write, check: Check) -> int:
    """Writes into a fresh folder with one more flush each time, until all succeed. Number of losses."""
    for flushes in count():
        folder = tmp_path / f"{flushes}"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            disk = LossyDisk(folder, patch, flushes)
            done = None
            with suppress(PowerLost, StorageError, RuntimeError):  # torch's writer wraps it
                write(folder)
                done = disk.flushes
        check(disk.restore(tmp_path / f"{flushes}-after"))
        if done is not None and done < flushes:
            return flushes
    raise AssertionError


def test_an_object_whose_put_returned_is_whole(tmp_path: Path) -> None:
    puts = {"a/b/first": b"1" * 9000, "a/second": b"2" * 9000, "a/b/c/third": b"3" * 9000}
    returned: list[str] = []

    def write(folder: Path) -> None:
        returned.clear()
        store = ObjectStore.from_url(f"file://{folder}/objects")
        source = folder.with_suffix(".source")
        for key, content in puts.items():
            source.write_bytes(content)
            store.put_file(key, source)
            returned.append(key)
        store.put_bytes("a/second", b"4" * 9000)
        returned.append("again")

    def check(folder: Path) -> None:
        store = ObjectStore.from_url(f"file://{folder}/objects")
        there = {key: store.get_bytes(key) for key in store.list()} if store.list() else {}
        assert set(returned) - {"again"} <= set(there)
        for key, content in there.items():
            allowed = {puts[key]} | ({b"4" * 9000} if key == "a/second" else set())
            assert content in allowed, key
        if "again" in returned:
            assert there["a/second"] == b"4" * 9000

    assert lose_power_everywhere(tmp_path, write, check) > len(puts)


def test_an_artifact_whose_manifest_is_there_can_be_read(tmp_path: Path) -> None:
    published: list[str] = []

    def open_in(folder: Path) -> Artifacts:
        objects = ObjectStore.from_url(f"file://{folder}/objects")
        ledger = folder.with_name(f"{folder.name}.db")  # rows are not promised
        return Artifacts(objects, Ledger(f"sqlite:///{ledger}").migrate())

    def write(folder: Path) -> None:
        published.clear()
        artifacts = open_in(folder)
        for version in range(2):
            made = folder.with_name(f"{folder.name}-made")
            (made / "deep").mkdir(parents=True, exist_ok=True)
            (made / "deep" / "file").write_bytes(bytes([version]) * 9000)
            recipe = {"version": version}
            identity = artifacts.identify("corpus", "nano", recipe, {"a.py": "1"}, ())
            artifacts.publish(identity, made, {})
            published.append(str(version))

    def check(folder: Path) -> None:
        artifacts = open_in(folder)
        for version in range(2):
            identity = artifacts.identify("corpus", "nano", {"version": version}, {"a.py": "1"}, ())
            found = artifacts.find("corpus", "nano", identity.fingerprint())
            assert found is not None or str(version) not in published
            if found is not None:
                copy = artifacts.local_copy(found, folder.with_name(f"{folder.name}-home"))
                assert (copy / "deep" / "file").read_bytes() == bytes([version]) * 9000

    assert lose_power_everywhere(tmp_path, write, check) > 4


def test_a_run_goes_on_from_a_whole_resume_point(tmp_path: Path) -> None:
    open_process_groups()
    saved: list[int] = []

    def write(folder: Path) -> None:
        saved.clear()
        with ResumePoints(folder / "run" / "points") as points:
            for step in (1, 2):
                weight = torch.full((5_000,), float(step))
                points.save(
                    f"{step:03}",
                    sharded_parts("w", weight, weight),
                    {"identity": "run", "step": step},
                )
                points.finish()
                saved.append(step)

    def check(folder: Path) -> None:
        found = ResumePoints(folder / "run" / "points").newest("run")
        if found is None:
            assert not saved
            return
        weight = torch.empty(5_000)
        load_parts(found[0], sharded_parts("w", weight, weight))
        assert weight.unique().tolist() == [found[1]["step"]]
        assert found[1]["step"] >= max(saved, default=1)

    assert lose_power_everywhere(tmp_path, write, check) > 6


def test_a_checkpoint_that_was_saved_is_whole(tmp_path: Path) -> None:
    weights = build_trainer_model(SMALL_SPEC, seed=1).export_weights()
    saved: list[Path] = []

    def write(folder: Path) -> None:
        saved.clear()
        saved.append(save_checkpoint(folder / "run" / "step-1", SMALL_SPEC, weights))

    def check(folder: Path) -> None:
        checkpoint = folder / "run" / "step-1"
        assert checkpoint.is_dir() or not saved
        if checkpoint.is_dir():
            loaded = load_checkpoint(checkpoint).weights
            assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())

    assert lose_power_everywhere(tmp_path, write, check) > 3
