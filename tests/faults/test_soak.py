"""Twenty minutes of cycles and faults: every cycle is accounted for."""

from pathlib import Path

import pytest

from tests.faults import soak

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(6_000)]


def test_every_cycle_of_a_soak_is_accounted_for(tmp_path: Path) -> None:
    assert soak.main(["--minutes", "20", "--out", str(tmp_path)]) == 0, (
        tmp_path / "soak.md"
    ).read_text()
