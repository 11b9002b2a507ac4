"""Trees of git: as they are stored, with links inside them followed and others left out."""

import subprocess
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
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


def test_files_come_as_they_are_stored_and_no_filter_of_the_repository_is_run(
    tmp_path: Path,
) -> None:
    """Attributes may ask for filters, other line ends, a commit's name in a file, or to leave it out."""
    place, marker = tmp_path / "tree", tmp_path / "ran"
    place.mkdir()
    attributes = b"*.py filter=evil eol=crlf ident export-subst\nhidden.py export-ignore\n"
    files = {
        ".gitattributes": attributes,
        "a.py": b"# $Format:%H$ $Id$\nx = 1\n",
        "empty.py": b"",
        "hidden.py": b"y = 2\n",
        "same.py": b"y = 2\n",
        "with space and\n line \xe9.py": b"\0\xff\n\n",
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    commit(place)
    for name, value in (("smudge", f"touch {marker}; cat"), ("process", f"touch {marker}")):
        subprocess.run(
            ["git", "-C", str(place), "config", f"filter.evil.{name}", value], check=True
        )
    (place / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    assert read_tree(place, "HEAD") == files
    assert not marker.exists()


def test_a_tree_without_files_and_a_submodule_are_read(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    make = ["git", "-C", str(tmp_path), "mktree", "--missing"]
    for entry in (b"", b"160000 commit " + b"1" * 40 + b"\tinner\n"):
        made = subprocess.run(make, input=entry, capture_output=True, check=True)
        assert read_tree(tmp_path, made.stdout.decode().strip()) == {}


def test_a_missing_object_and_one_too_many_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 100)
    (tmp_path / "b.py").write_text("x = 1\n" * 100)
    commit(tmp_path)
    with pytest.raises(ProblemError, match="more than 1000 bytes"):
        read_tree(tmp_path, "HEAD", 1000)
    name = subprocess.check_output(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD:a.py"], text=True
    )
    (tmp_path / ".git" / "objects" / name[:2] / name[2:].strip()).unlink()
    with pytest.raises(ProblemError, match="lacks the object"):
        read_tree(tmp_path, "HEAD")


def test_a_commit_is_no_option(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    commit(tmp_path)
    with pytest.raises(ProblemError, match="name-only"):
        read_tree(tmp_path, "--name-only")
