"""Trees of git: links inside them are followed, others are left out."""

import subprocess
from pathlib import Path

from ostinato.infra.platform.git import read_tree


def commit(folder: Path) -> None:
    identity = ["-c", "user.name=A Person", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def test_a_link_to_a_file_of_the_tree_is_that_file(tmp_path: Path) -> None:
    """As python-semver keeps modules that its documentation shows among its tests."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "shown.py").write_text("x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "shown.py").symlink_to("../docs/shown.py")
    (tmp_path / "twice.py").symlink_to("tests/shown.py")
    commit(tmp_path)
    assert read_tree(tmp_path, "HEAD") == dict.fromkeys(
        ("docs/shown.py", "tests/shown.py", "twice.py"), b"x = 1\n"
    )


def test_links_out_of_the_tree_in_circles_and_to_folders_are_left_out(tmp_path: Path) -> None:
    place = tmp_path / "tree"
    (place / "folder").mkdir(parents=True)
    (place / "folder" / "file.py").write_text("x = 1\n")
    (tmp_path / "secret").write_text("secret\n")
    for target, name in (
        ("/etc/passwd", "absolute"),
        ("../secret", "above"),
        ("../tree/folder/file.py", "above_and_back"),
        ("one", "other"),
        ("other", "one"),
        ("folder", "to_a_folder"),
        ("gone", "to_nothing"),
    ):
        (place / name).symlink_to(target)
    commit(place)
    assert set(read_tree(place, "HEAD")) == {"folder/file.py"}
