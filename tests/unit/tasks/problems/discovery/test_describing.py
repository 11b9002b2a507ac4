"""Directories and git repositories become sources; nothing that they name is run."""

import subprocess
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ConfigError, ProblemError
from ostinato.infra.platform.source_archives import SourceArchive, fetch_archive, read_archive
from ostinato.tasks.problems.discovery.describing import describe_source

FILES = {
    "src/shop/__init__.py": "def add(a, b):\n    return a + b\n",
    "tests/test_shop.py": "import shop\n\n\ndef test_add():\n    assert shop.add(1, 2) == 3\n",
    "pyproject.toml": '[project]\nname = "shop"\nversion = "1"\n',
}


def write_project(directory: Path) -> Path:
    for path, text in FILES.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return directory


def git(directory: Path, *arguments: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(
        ["git", *settings, "-C", str(directory), *arguments], check=True, capture_output=True
    )


def test_a_directory_becomes_an_archive_that_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    (project / ".venv" / "lib").mkdir(parents=True)
    (project / ".venv" / "lib" / "shop.py").write_text("")
    (project / "outside.py").symlink_to("/etc/passwd")

    first = describe_source(str(project), None, cache, 0)
    second = describe_source(str(project), None, cache, 0)

    assert first == second
    source = first.repository
    assert (source.stripped_prefix, source.package_paths) == ("src", ("shop",))
    archive = SourceArchive(name=source.name, version=source.version, sha256=source.sha256)
    files = read_archive(fetch_archive(archive, cache))
    assert files == {path: text.encode() for path, text in FILES.items()}


def test_a_package_of_the_test_runner_is_refused(tmp_path: Path) -> None:
    """Its original lies in every box."""
    (tmp_path / "packaging").mkdir()
    (tmp_path / "packaging" / "__init__.py").write_text("")
    (tmp_path / "test_it.py").write_text("def test_it():\n    import packaging\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "packaging"\nversion = "1"\n')

    with pytest.raises(ProblemError, match=r"hold \['packaging'\], which the test runner brings"):
        describe_source(str(tmp_path), None, tmp_path / "cache", 0)


def test_another_content_is_another_version(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")
    before = describe_source(str(project), None, tmp_path / "cache", 0).repository
    (project / "src/shop/__init__.py").write_text("def add(a, b):\n    return b + a\n")
    after = describe_source(str(project), None, tmp_path / "cache", 0).repository

    assert before.version != after.version


def test_a_git_repository_gives_its_newest_commit_and_its_history(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "-m", "begin")
    (project / "untracked.py").write_text("")

    found = describe_source(str(project), None, tmp_path / "cache", 30)

    assert found.history is not None
    assert (found.history.max_commits, found.history.package_paths) == (30, ("shop",))
    assert Path(found.history.path) != project
    assert "untracked" not in str(found.repository)


@pytest.mark.parametrize(
    "setting", ["core.fsmonitor", "core.pager", "gpg.program", "core.hooksPath"]
)
def test_programs_of_a_repositorys_configuration_do_not_run(tmp_path: Path, setting: str) -> None:
    project, mark = write_project(tmp_path / "shop"), tmp_path / "mark"
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "-m", "begin")
    program = tmp_path / "programs" / "post-checkout"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    git(project, "config", setting, str(program.parent if setting == "core.hooksPath" else program))
    git(project, "config", "log.showSignature", "true")

    describe_source(str(project), None, tmp_path / "cache", 5)

    assert list((tmp_path / "cache").iterdir())
    assert not mark.exists()


@pytest.mark.parametrize("place", ["./nowhere", "/nowhere/at/all", "no such package", "a/b"])
def test_a_place_where_nothing_is_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="wanted a directory, a git repository"):
        describe_source(place, None, tmp_path, 0)


def test_commits_of_a_plain_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--commits 5 of .*, wanted a git repository"):
        describe_source(str(write_project(tmp_path / "shop")), None, tmp_path / "cache", 5)
