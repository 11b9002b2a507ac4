"""The wheel holds all of the product under one name, and works outside any checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES, ROOT, list_files

ROOT_FILES = ("__init__.py", "__init__.pyi", "prefect.yaml")
SAYS_WHERE_IT_IS = """
import ostinato
from ostinato.flows.operating import local_prefect
from ostinato.flows.recipe import load_recipe
load_recipe("miniature")
print(ostinato.__file__, *local_prefect.flow_names())
print(local_prefect.REPOSITORY)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing an earlier build left behind can enter."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in list_files():
        if name.split("/")[0] not in ("tests", "docs", "examples"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", built, copy], check=True, capture_output=True)
    (path,) = built.glob("ostinato-*.whl")
    return path


def test_one_name_and_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    product = {f"ostinato/{name}" for name in list_files() if name.split("/")[0] in PACKAGES}

    assert names == product | {f"ostinato/{name}" for name in ROOT_FILES}


def test_it_runs_from_a_folder_that_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    answer = subprocess.run(
        [sys.executable, "-P", "-c", SAYS_WHERE_IT_IS],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    first, root = answer.stdout.splitlines()
    place, *flows = first.split()
    assert Path(place).is_relative_to(installed)
    assert "agent_training" in flows
    assert Path(root).is_relative_to(installed)
    assert all((Path(root) / "flows" / f"{flow}.py").is_file() for flow in flows)
