"""Directories and git repositories become sources; nothing that they name is run."""

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
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


def begin(project: Path) -> None:
    git(project, "init", "--quiet", "-b", "main")
    record(project, "begin")


def record(project: Path, message: str) -> str:
    git(project, "add", "-A")
    git(project, "commit", "--quiet", "--allow-empty", "-m", message)
    told = subprocess.check_output(["git", "-C", str(project), "rev-parse", "HEAD"], text=True)
    return told.strip()


def source_of(place: str, cache: Path) -> bytes:
    """The product code that `problems from` takes."""
    found = describe_source(place, None, cache, 0).repository
    archive = SourceArchive(name=found.name, version=found.version, sha256=found.sha256)
    return read_archive(fetch_archive(archive, cache))["src/shop/__init__.py"]


def change(project: Path, text: str) -> None:
    (project / "src/shop/__init__.py").write_text(text)


@pytest.mark.parametrize("place", [".git", "{}/.git"], ids=["relative", "absolute"])
def test_a_hook_of_another_repository_changes_nothing(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git names the repository of a hook in the environment of what the hook starts."""
    project, mine = write_project(tmp_path / "shop"), tmp_path / "mine"
    mine.mkdir()
    begin(project)
    begin(mine)
    before = {path: path.stat().st_mtime_ns for path in mine.rglob("*")}
    monkeypatch.chdir(mine)
    monkeypatch.setenv("GIT_DIR", place.format(mine))
    monkeypatch.setenv("GIT_INDEX_FILE", f"{place.format(mine)}/index")

    assert source_of(str(project), tmp_path / "cache").startswith(b"def add")
    assert {path: path.stat().st_mtime_ns for path in mine.rglob("*")} == before


def test_what_git_says_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="git fetch") as refused:
        describe_source(f"file://{tmp_path}/gone", None, tmp_path / "cache", 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_later_commit_is_seen(tmp_path: Path, scheme: str) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    before = source_of(f"{scheme}{project}", cache)
    change(project, "def add(a, b):\n    return b + a\n")
    record(project, "later")
    after = source_of(f"{scheme}{project}", cache)

    assert (b"a + b" in before, b"b + a" in after) == (True, True)


def test_rewritten_history_and_another_branch_are_seen(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    source_of(str(project), cache)
    change(project, "def add(a, b):\n    return b + a\n")
    git(project, "add", "-A")
    git(project, "commit", "--quiet", "--amend", "-m", "rewritten")
    assert b"b + a" in source_of(str(project), cache)
    git(project, "checkout", "--quiet", "-b", "other")
    change(project, "def add(a, b):\n    return a + b + 0\n")
    record(project, "on a branch")
    assert b"+ 0" in source_of(str(project), cache)


def test_a_branch_tag_or_commit_is_taken_where_it_stands_behind_the_place(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    git(project, "tag", "v1")
    git(project, "branch", "feature/old")
    commit = record(project, "nothing")
    change(project, "def add(a, b):\n    return b + a\n")
    record(project, "later")

    for revision in ("v1", "feature/old", commit):
        assert b"a + b" in source_of(f"file://{project}@{revision}", cache), revision
        assert b"a + b" in source_of(f"{project}@{revision}", cache), revision
    assert b"b + a" in source_of(f"git+file://{project}@main", cache)
    with pytest.raises(ProblemError, match="remote ref gone"):
        source_of(f"{project}@gone", cache)


def test_an_old_copy_is_told_with_its_age_when_no_newer_one_can_be_had(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    place = f"file://{project}"
    before = describe_source(place, None, cache, 0)
    project.rename(tmp_path / "moved")

    after = describe_source(place, None, cache, 0)

    assert after.repository == before.repository
    [remark] = after.remarks
    assert "the copy fetched on 2" in remark
    assert "0.0 hours ago, is used" in remark
    with pytest.raises(ProblemError, match="git fetch"):
        describe_source(f"file://{project}-other", None, cache, 0)


def test_an_empty_repository_is_refused_and_taken_once_it_has_a_commit(tmp_path: Path) -> None:
    project, cache = tmp_path / "shop", tmp_path / "cache"
    project.mkdir()
    git(project, "init", "--quiet", "-b", "main")
    with pytest.raises(ProblemError, match="HEAD of it is no commit"):
        source_of(str(project), cache)
    write_project(project)
    record(project, "begin")
    assert b"a + b" in source_of(str(project), cache)


def test_a_copy_that_a_killed_process_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    source_of(str(project), cache)
    [copy] = (cache / "git").glob("*.git")
    ruins = {
        "locked": lambda: (copy / "packed-refs.lock").write_text(""),
        "no object": lambda: [path.unlink() for path in (copy / "objects").rglob("*") if path.is_file()],
        "no config": lambda: (copy / "config").write_text("[core"),
        "a HEAD alone": lambda: [path.unlink() for path in copy.rglob("*") if path.is_file() and path.name != "HEAD"],
    }  # fmt: skip
    for name, ruin in ruins.items():
        ruin()
        change(project, f"def add(a, b):\n    return a + b  # {name}\n")
        record(project, name)
        assert name.encode() in source_of(str(project), cache), name


def test_two_runs_at_once_take_the_same_commit(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    begin(project)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: describe_source(str(project), None, cache, 9), range(4)))
    assert all(item == found[0] for item in found)


def test_a_shallow_clone_gives_its_newest_commit(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")
    begin(project)
    record(project, "later")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{project}", "shallow")
    assert b"a + b" in source_of(str(tmp_path / "shallow"), tmp_path / "cache")


def test_what_no_project_should_hold_is_left_out_unread(tmp_path: Path) -> None:
    project, cache = write_project(tmp_path / "shop"), tmp_path / "cache"
    with (project / "model.bin").open("wb") as file:
        file.truncate(30 << 30)
    os.mkfifo(project / "pipe.py")
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(project / "door.py"))
    (project / "ring").symlink_to(project)
    Path(os.fsdecode(os.fsencode(project) + b"/caf\xe9.py")).write_text("")
    deep = os.open(project, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deep)
        deep, above = os.open("d", os.O_RDONLY, dir_fd=deep), deep
        os.close(above)
    os.close(deep)

    found = describe_source(str(project), None, cache, 0)
    subprocess.run(["rm", "-rf", str(project)], check=True)  # too deep for pytest's own clean-up

    assert any("model.bin" in remark and "2 files" in remark for remark in found.remarks)
    archive = SourceArchive(name="shop", version=found.repository.version)
    assert set(read_archive(fetch_archive(archive, cache))) == set(FILES)


@pytest.mark.parametrize(
    "text",
    [
        b'TOTAL = "0"' + b' + "1"' * 6000,
        b"x = " + b"[" * 5000 + b"]" * 5000,
        b"x = " + b"(" * 150 + b")" * 150,
        b"type X[T] = list[T]\n",
        b"# coding: latin-1\nname = '\xe9'\n",
        b"\xef\xbb\xbfx = 1\r\n\x0cy = 2\r\n",
        b"x = 1\0",
        b"\xff\xfe",
    ],
)
def test_a_module_that_does_not_parse_is_not_looked_at(tmp_path: Path, text: bytes) -> None:
    project = write_project(tmp_path / "shop")
    (project / "src/shop/made.py").write_bytes(text)
    (project / "tests/test_made.py").write_bytes(text)
    (project / "setup.py").write_bytes(text)
    assert describe_source(str(project), None, tmp_path / "cache", 0).repository.package_paths


@pytest.mark.parametrize(
    "text",
    ["tool = 3", "[project]\nname = 3\ndependencies = 4", "[tool.setuptools.packages]\nfind = 1"],
)
def test_metadata_of_another_form_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    project = write_project(tmp_path / "shop")
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(ProblemError, match="its metadata cannot be read"):
        describe_source(str(project), None, tmp_path / "cache", 0)


@pytest.mark.parametrize("place", ["b/" + "a" * 300, "~nobody-of-this-name/shop", "b/" * 3000])
def test_a_place_that_no_file_system_can_have_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="wanted a directory, a git repository"):
        describe_source(place, None, tmp_path, 0)


@pytest.mark.parametrize("name", ["a/b", "../up", "two words", "-x", "n" * 101])
def test_a_name_that_no_recipe_can_have_is_refused(tmp_path: Path, name: str) -> None:
    project = write_project(tmp_path / "shop")
    with pytest.raises(ConfigError, match="wanted a name of letters, digits"):
        describe_source(str(project), name, tmp_path / "cache", 0)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My Shop (copy)", "my-shop-copy"), (".shop", "shop"), ("\u5e97", "project")],
)
def test_a_folder_of_any_name_gives_a_name_of_a_recipe(
    tmp_path: Path, folder: str, name: str
) -> None:
    project = write_project(tmp_path / folder)
    found = describe_source(str(project), None, tmp_path / "cache", 0)
    assert found.repository.name == name


def test_a_project_in_a_folder_of_another_name_finds_its_own_version(tmp_path: Path) -> None:
    project = write_project(tmp_path / "my-clone")
    begin(project)
    found = describe_source(str(project), None, tmp_path / "cache", 1)
    assert found.history is not None
    for source in (found.repository, found.history):
        assert "Version: 1\n" in source.generated_files["shop-1.dist-info/METADATA"]


def test_a_tree_as_deep_as_the_system_permits_is_read(tmp_path: Path) -> None:
    """A folder can be listed although the path of a file in it would be too long."""
    project = write_project(tmp_path / "shop")
    here = os.open(project, os.O_RDONLY)
    left = 4090 - len(str(project))
    while left > 1:
        step = "d" * min(left - 1, 200)
        os.mkdir(step, dir_fd=here)
        here, _ = os.open(step, os.O_RDONLY, dir_fd=here), os.close(here)
        left -= len(step) + 1
    os.close(here)
    assert describe_source(str(project), None, tmp_path / "cache", 0).repository.name == "shop"


def test_what_a_commit_holds_and_is_left_out_is_told(tmp_path: Path) -> None:
    project = write_project(tmp_path / "shop")
    (project / "tests/data").symlink_to("../src")
    (project / "big.bin").write_bytes(bytes(5 << 20))
    begin(project)
    told = describe_source(str(project), None, tmp_path / "cache", 0).remarks
    assert "2 files or folders, such as big.bin, tests/data" in " ".join(told)
