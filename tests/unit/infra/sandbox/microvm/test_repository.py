"""A repository on its way into a guest, and the comparison of files."""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.platform.errors import OutputLimit
from ostinato.infra.sandbox.microvm.templates import read_repository
from ostinato.infra.sandbox.snapshots.store import MAX_DIFF_BYTES, compare_files

FILES = st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e"]), st.binary(max_size=3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/work.py").write_text("def work(): ...\n")
    (tmp_path / "run").write_text("echo run\n")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("pkg/work.py")
    for hidden in (".git/config", "pkg/__pycache__/work.pyc", "pkg/work.py.orig"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("the answer")
    return tmp_path


def test_what_is_packed_unpacks_without_caches_and_history(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(fileobj=io.BytesIO(read_repository(folder).pack())) as archive:
        archive.extractall(target, filter="fully_trusted")
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "link",
        "pkg",
        "pkg/work.py",
        "run",
    ]
    assert (target / "run").stat().st_mode & 0o777 == 0o755
    assert str((target / "link").readlink()) == "pkg/work.py"
    assert (target / "pkg/work.py").read_bytes() == (folder / "pkg/work.py").read_bytes()


def test_key_follows_content_and_not_time(folder):
    first = read_repository(folder)
    (folder / "run").touch()
    assert read_repository(folder).key == first.key
    (folder / "run").write_text("echo other\n")
    assert read_repository(folder).key != first.key
    assert set(first.files) == {"pkg/work.py", "run"}


@given(before=FILES, now=FILES)
def test_differences_turn_one_state_into_the_other(before, now):
    files = dict(before)
    changes = compare_files(before, now)
    for path, content in changes.items():
        if content is None:
            del files[path]
        else:
            assert files.get(path) != content
            files[path] = content
    assert files == now


def test_caches_do_not_differ_and_a_flood_is_refused():
    assert compare_files({}, {"pkg/__pycache__/x.pyc": b"new", ".git/index": b"new"}) == {}
    with pytest.raises(OutputLimit, match="diff of over"):
        compare_files({}, {"large": bytes(MAX_DIFF_BYTES + 1)})
