"""Rules of tests/conftest.py: a skip that nobody reviewed ends a run with exit code 1; of sampled cases a part runs; long
tests come first.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

SKIPS = "import pytest\n\ndef test_one():\n    pytest.skip('no reason')\n"
SKIPS_MODULE = "import pytest\n\npytest.importorskip('no_such_module_anywhere')\n"
SAMPLED = """import pytest

@pytest.mark.parametrize("case", range(5))
@pytest.mark.sampled(2)
def test_one(case):
    assert case in (0, 2)
"""
PASSES = "def test_one():\n    pass\n"
LONG = "import pytest\n\n@pytest.mark.{mark}\ndef test_long():\n    pass\n" + PASSES


def _run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text + PASSES.replace("one", "two"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        str(tmp_path),
        *options,
    ]
    # ours take five seconds to load
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", [SKIPS, SKIPS_MODULE])
def test_skip_that_is_not_listed_fails_the_run_and_is_named(tmp_path: Path, text: str) -> None:
    answer = _run(tmp_path, text)

    assert answer.returncode == 1
    assert "test_it.py" in answer.stdout.partition("not in allowed_skips.txt")[2]


def test_run_without_a_skip_passes(tmp_path: Path) -> None:
    assert _run(tmp_path, PASSES).returncode == 0


def test_sampled_cases_are_spread_and_the_others_are_nightly(tmp_path: Path) -> None:
    assert "3 passed, 3 deselected" in _run(tmp_path, SAMPLED, "-m", "not nightly").stdout
    assert "3 failed, 3 deselected" in _run(tmp_path, SAMPLED, "-m", "nightly").stdout


def test_files_with_long_tests_that_run_come_first(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(PASSES)
    (tmp_path / "test_x.py").write_text(LONG.format(mark="browser"))
    (tmp_path / "test_y.py").write_text(LONG.format(mark="slow"))

    def order(*options: str) -> list[str]:
        said = _run(tmp_path, PASSES, "--collect-only", *options).stdout
        return list(dict.fromkeys(re.findall(r"test_(\w+)\.py::", said)))

    assert order() == ["x", "y", "a", "it"]
    assert order("-m", "not slow") == ["x", "a", "it", "y"]
