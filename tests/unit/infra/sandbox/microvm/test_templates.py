"""Laws of the machines kept beside the images, with files of a few bytes."""

import shutil

import pytest

from ostinato.infra.sandbox.microvm import templates
from ostinato.infra.sandbox.microvm.image import Image, ImageKind
from ostinato.infra.sandbox.microvm.machine import Accelerator, MachineShape, MachineState
from ostinato.infra.sandbox.microvm.templates import GuestRepository, Template, TemplateStore


@pytest.fixture
def stores(tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "hash_program", lambda: "qemu")
    made = [TemplateStore(tmp_path / "images") for _ in range(2)]
    yield made
    for store in made:
        shutil.rmtree(store.folder)


def test_a_kept_machine_is_found_and_no_part_of_one_stays(stores, tmp_path):
    first, second = stores
    image = Image(ImageKind.PYTHON, "python-1", *[tmp_path] * 3, disk=None)
    shape = MachineShape(image, Accelerator.TCG, 128 << 20, 1000)
    memory, devices = tmp_path / "memory", tmp_path / "devices"
    memory.write_bytes(b"memory")
    devices.write_bytes(b"devices")
    template = Template(shape, MachineState(memory, devices), GuestRepository())
    booted = tmp_path / "images" / "booted"
    (booted / "python-1.partial.killed").mkdir(parents=True)
    devices.rename(tmp_path / "away")  # a copy fails half way
    with pytest.raises(FileNotFoundError):
        first._save_to_cache(template)
    (tmp_path / "away").rename(devices)
    assert first._load_cached(shape) is None
    for store in (first, second):
        store._save_to_cache(template)
    assert [path.name for path in booted.iterdir() if path.is_dir()] == [
        "python-1-tcg-128-1000-qemu"
    ]
    found = second._load_cached(shape)
    assert found is not None
    assert found.state.memory_file.read_bytes() == b"memory"
    assert found.state.devices_file.read_bytes() == b"devices"
