"""The rate of the host's counter: measured once per boot of the host, by the image's program."""

from pathlib import Path

import pytest

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.microvm.image import Image, ImageKind
from ostinato.infra.sandbox.microvm.templates import measure_ticks_khz, read_boot_id


def image_that_measures(folder: Path, command: str) -> Image:
    program = folder / "tick_rate"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return Image(ImageKind.SMALL, "key", folder / "kernel", folder / "initial", program, None)


def test_rate_is_rounded_and_measured_once_per_boot_of_the_host(tmp_path):
    first = image_that_measures(tmp_path, "echo 2596122")
    assert measure_ticks_khz(first, tmp_path) == 2_596_120
    again = image_that_measures(tmp_path, "echo 1000000")
    assert measure_ticks_khz(again, tmp_path) == 2_596_120
    (tmp_path / f"ticks-khz-{read_boot_id()}").unlink()
    assert measure_ticks_khz(again, tmp_path) == 1_000_000


@pytest.mark.parametrize("command", ["exit 1", "echo nan", "echo 0"])
def test_a_measurement_that_failed_is_an_error_and_not_kept(tmp_path, command):
    with pytest.raises(SandboxError, match="wanted 0 and a number of kilohertz"):
        measure_ticks_khz(image_that_measures(tmp_path, command), tmp_path)
    assert measure_ticks_khz(image_that_measures(tmp_path, "echo 7000"), tmp_path) == 7000
