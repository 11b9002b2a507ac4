"""A box that cannot start leaves nothing behind."""

import errno
import os
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import CapacityExhausted, SandboxError
from ostinato.infra.sandbox.host import box
from ostinato.infra.sandbox.protocol import SandboxLimits


def _no_bubblewrap(*_) -> None:
    raise SandboxError("no bwrap binary")


def _no_descriptor(*_, **__) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("owner", "name", "instead", "raised"),
    [
        (box, "find_bubblewrap", _no_bubblewrap, SandboxError),
        (box, "build_starter", _no_bubblewrap, SandboxError),
        (box, "build_starter", lambda: Path("/none"), SandboxError),
        (box.subprocess, "Popen", _no_descriptor, CapacityExhausted),
        (box.os, "pipe", _no_descriptor, CapacityExhausted),
    ],
)
def test_a_box_that_cannot_start_leaves_no_descriptor_and_no_group(
    monkeypatch, owner, name, instead, raised
):
    groups = []

    class Group:
        def __init__(self, name: str, limits: SandboxLimits) -> None:
            groups.append(name)
            self.remove = groups.pop

    limits = SandboxLimits()
    box.BoxProcess(limits, ()).close()  # what is kept for all boxes is made
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    monkeypatch.setattr(box, "ControlGroup", Group)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(raised):
        box.BoxProcess(limits, ())
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    assert groups == []


def test_entries_of_the_host_are_none_of_a_box_that_has_not_left_its_root():
    held = box.BoxProcess(SandboxLimits(), ())
    held.process_id = os.getpid()
    assert held.count_entries_in_memory() == 0
    held.close()
