"""Patched files: the patches lead from the first state to the last, and scores are what they say."""

import subprocess
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.evaluation.base_models.state_tracking import make_files, prompt_of, score

TEXT = "\n".join(f"value_{number} = {number} * {number}" for number in range(64))


def test_patches_lead_from_the_first_state_to_the_last(tmp_path: Path) -> None:
    files = make_files([TEXT], count=4, lines=16, patches=5, seed=3)
    assert len({file.before for file in files}) == 4
    for file in files:
        assert len(file.patches) == 5
        place = tmp_path / file.path
        place.write_text(file.before + "\n")
        for patch in file.patches:
            subprocess.run(
                ["git", "apply", "-p0", "--unidiff-zero", "-"],
                input=patch.encode() + b"\n",
                cwd=tmp_path,
                check=True,
            )
        assert place.read_text() == file.after + "\n"
        assert file.after not in prompt_of(file, 10).text


def test_the_last_state_scores_nothing_off_and_the_first_as_much_as_ignoring_the_patches() -> None:
    files = make_files([TEXT], count=3, lines=16, patches=4, seed=0)
    right = score(files, [f"{file.after}\n" for file in files])
    assert (right.mean_distance, right.exact, right.too_long) == (0, 3, 0)
    copied = score(files, [file.before for file in files])
    assert copied.mean_distance == copied.copied_distance > 0
    silent = score(files, [None, "", files[2].after])
    assert silent.mean_distance == pytest.approx((len(files[0].after) + len(files[1].after)) / 3)
    assert silent.too_long == 1


def test_equal_seeds_give_equal_files() -> None:
    assert make_files([TEXT], count=3, lines=8, patches=2, seed=5) == make_files(
        [TEXT], count=3, lines=8, patches=2, seed=5
    )


def test_code_base_too_short_for_one_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="tracked_lines=65"):
        make_files([TEXT, "```"], count=3, lines=65, patches=2, seed=0)
