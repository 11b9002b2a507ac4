"""`ostinato problems from` over a repository that nobody prepared, up to the published set."""

import json
import subprocess
from pathlib import Path

import pytest

from ostinato.tasks.problems.published import PROBLEMS_FILE
from tests.fakes.processes import run_command
from tests.fakes.shop_project import CODE, TESTS


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(folder / "home", *arguments, cwd=folder)


def write_project(directory: Path) -> Path:
    (directory / "src" / "shop").mkdir(parents=True)
    (directory / "tests").mkdir()
    (directory / "src" / "shop" / "__init__.py").write_text(CODE)
    (directory / "tests" / "test_shop.py").write_text(TESTS)
    (directory / "tests" / "test_broken.py").write_text("import no_such_module_anywhere\n")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_directory_becomes_problems_in_all_splits(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")

    asked = ("problems", "from", str(project), "--problems", "20", "--refactorings", "4")
    made = run_in(tmp_path, *asked)

    told = made.stdout + made.stderr
    assert made.returncode == 0, told
    assert "no_such_module_anywhere" in told
    assert 'extends = "problems_16"' in (tmp_path / "shop.toml").read_text()
    [published] = (tmp_path / "home" / "objects" / "artifacts" / "problems").rglob(PROBLEMS_FILE)
    rows = [json.loads(line) for line in published.read_text().splitlines()]
    assert {row["split"] for row in rows} == {
        "demonstration", "train", "held_out", "held_out_function", "user",
    }  # fmt: skip
    assert sum(row["kind"] == "refactoring" for row in rows) in range(2, 5)
    again = run_in(tmp_path, *asked)
    assert again.returncode == 0
    assert "already_built" in again.stdout + again.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_splits_that_stay_empty_are_an_error(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")
    (project / "tests" / "test_shop.py").write_text(
        "import shop\n\n\ndef test_a():\n    assert shop.clamp([]) == []\n"
    )

    made = run_in(tmp_path, "problems", "from", str(project), "--problems", "20")

    assert made.returncode == 2
    assert "no problem for" in made.stderr or "no source gave a problem" in made.stderr


@pytest.mark.parametrize("place", ["./nowhere", "two words"])
def test_a_place_where_nothing_is_is_refused_before_anything_starts(
    tmp_path: Path, place: str
) -> None:
    made = run_in(tmp_path, "problems", "from", place)

    assert made.returncode == 2
    assert "wanted a directory, a git repository" in made.stderr
    assert not (tmp_path / "home").exists()
