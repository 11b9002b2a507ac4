"""Changes of a repository as a record: what travels comes back, and comparison is exact."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.infra.sandbox.inside.wire import FrameDecoder
from ostinato.infra.sandbox.microvm.changes import (
    Changes,
    Entry,
    changes_of_reply,
    compare_files,
    read_folder,
)

PATHS = st.sampled_from(["a", "b", "c/d", "c/e"])
ENTRIES = st.one_of(
    st.builds(
        Entry, st.just("file"), st.sampled_from([0o644, 0o755]), content=st.binary(max_size=9)
    ),
    st.builds(Entry, st.just("link"), st.just(0o777), target=st.sampled_from(["a", "/x"])),
    st.builds(Entry, st.just("folder"), st.just(0o755)),
)
CHANGES = st.builds(Changes, st.dictionaries(PATHS, ENTRIES), st.frozensets(PATHS))
PRISTINE = st.dictionaries(PATHS, st.binary(max_size=9))


def apply(changes: Changes, pristine: dict[str, bytes]) -> dict[str, bytes]:
    """The regular files there are afterwards."""
    files = {path: text for path, text in pristine.items() if path not in changes.removed}
    for path, entry in changes.entries.items():
        files.pop(path, None)
        if entry.kind == "file":
            files[path] = entry.content
    return files


@given(CHANGES)
def test_encoded_changes_come_back(changes):
    (frame,) = FrameDecoder().feed(changes.encode())
    assert changes_of_reply(*frame) == changes
    assert changes.differing(changes) == 0


@given(CHANGES, CHANGES, PRISTINE)
def test_comparison_names_exactly_the_files_that_differ(now, before, pristine):
    new, old = apply(now, pristine), apply(before, pristine)
    expected = {path: new.get(path) for path in {*new, *old} if new.get(path) != old.get(path)}
    assert compare_files(now, before, pristine.get) == expected


def test_a_folder_is_read_with_links_and_executable_bits(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "run").write_bytes(b"x")
    (tmp_path / "tools" / "run").chmod(0o700)
    (tmp_path / "link").symlink_to("tools/run")
    assert read_folder(tmp_path).entries == {
        "link": Entry("link", 0o777, target="tools/run"),
        "tools": Entry("folder", 0o755),
        "tools/run": Entry("file", 0o755, content=b"x"),
    }
