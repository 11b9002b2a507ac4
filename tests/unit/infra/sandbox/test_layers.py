"""Layers as data: identity, folding, reading and writing folders."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.infra.platform.errors import InvalidArgument
from ostinato.infra.sandbox.snapshots.layers import (
    Entry,
    EntryKind,
    entries_of_files,
    fold_entries,
    identify_entries,
    measure_folder,
    read_entries,
    remove_folder,
    write_entries,
)
from ostinato.infra.sandbox.snapshots.store import LayerStore, State, compare_files, files_of

# The machine may be loaded: how long an example takes says nothing.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.builds(
    Entry,
    st.just(EntryKind.FILE),
    st.binary(max_size=8),
    st.sampled_from([0o644, 0o755, 0o600]),
    st.integers(1, 2**60),
)
LINKS = st.builds(Entry, st.just(EntryKind.LINK), st.just(b"target"), st.just(0o777))
REMOVED = st.just(Entry(EntryKind.REMOVED, mode=0))
FOLDERS = st.builds(Entry, st.just(EntryKind.FOLDER), mode=st.just(0o755), is_opaque=st.booleans())


def complete(entries: dict[str, Entry]) -> dict[str, Entry]:
    """As an overlay leaves a layer: what lies below a path lies in folders that are entries too."""
    whole: dict[str, Entry] = {}
    for path in sorted(entries):
        parts = path.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(whole.get(p, Entry(EntryKind.FOLDER)).kind is not EntryKind.FOLDER for p in parents):
            continue
        for parent in parents:
            whole.setdefault(parent, Entry(EntryKind.FOLDER, mode=0o755))
        whole[path] = entries[path]
    return whole


LAYERS = st.dictionaries(PATHS, FILES | LINKS | REMOVED | FOLDERS, max_size=8).map(complete)


def look_up(layers: list[dict[str, Entry]], path: str) -> Entry | None:
    """What a path shows through layers, top first: the overlay's rule, told the simplest way."""
    parts = path.split("/")
    shown = None
    for depth in range(1, len(parts) + 1):
        shown, layers = _look_up_name(layers, "/".join(parts[:depth]))
        if shown is None or (shown.kind is not EntryKind.FOLDER and depth < len(parts)):
            return None
    return shown


def _look_up_name(layers, path):
    """The topmost entry, and the layers in which names below it still count."""
    shown, seen = None, []
    for layer in reversed(layers):
        entry = layer.get(path)
        if entry is None:
            continue
        if entry.kind is EntryKind.REMOVED or (shown and entry.kind is not EntryKind.FOLDER):
            break
        shown = shown or entry
        seen.append(layer)
        if entry.kind is not EntryKind.FOLDER or entry.is_opaque:
            break
    return shown, seen[::-1]


@PATIENT
@given(LAYERS, LAYERS)
def test_identity_forgets_times_only(first, second):
    later = {path: Entry(e.kind, e.content, e.mode, 5, e.is_opaque) for path, e in first.items()}
    assert identify_entries(first) == identify_entries(later)
    timeless = [
        {path: replace(entry, modified_ns=0) for path, entry in entries.items()}
        for entries in (first, second)
    ]
    same = timeless[0] == timeless[1]
    assert (identify_entries(first) == identify_entries(second)) == same


@PATIENT
@given(LAYERS, LAYERS, LAYERS)
def test_folded_layers_show_what_the_chain_shows(below, lower, upper):
    folded = fold_entries(lower, upper)
    for path in {*below, *lower, *upper}:
        chain = look_up([below, lower, upper], path)
        short = look_up([below, folded], path)
        assert (chain and (chain.kind, chain.content)) == (short and (short.kind, short.content))


@settings(PATIENT, max_examples=30)
@given(LAYERS)
def test_written_folders_read_back(entries):
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "layer"
        write_entries(entries, folder)
        read = read_entries(folder)
        remove_folder(folder)
    assert {path: (e.kind, e.content, e.is_opaque) for path, e in read.items()} == {
        path: (e.kind, e.content, e.is_opaque) for path, e in entries.items()
    }


def test_reading_drops_rights_of_programs(tmp_path):
    folder = tmp_path / "layer"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "tool").write_text("x")
    (folder / "d" / "tool").chmod(0o4755)
    os.mkfifo(folder / "pipe")
    entries = read_entries(folder)
    assert set(entries) == {"d", "d/tool"}
    assert entries["d/tool"].mode == 0o755


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a"])
def test_files_outside_are_no_layer(path):
    with pytest.raises(InvalidArgument):
        entries_of_files({path: b""}, lambda folder: None)


def test_states_fold_into_one_layer_and_compare_by_content(tmp_path):
    store = LayerStore(tmp_path)
    state = State(None)
    for number in range(5):
        state = store.apply_files(state, {"same": b"%d" % number, f"d/{number}": b"x"})
    again = store.apply_files(State(None), {"same": b"4", **{f"d/{n}": b"x" for n in range(5)}})
    assert state == again
    whole = files_of(store.whole(state))
    changed = files_of(store.whole(store.apply_files(state, {"d/0": None})))
    assert compare_files({}, whole)["same"] == b"4"
    assert compare_files(whole, changed) == {"d/0": None}
    store.close()


def test_layers_live_as_long_as_they_are_held(tmp_path):
    store = LayerStore(tmp_path)
    state = store.apply_files(State(None), {"a/b": b"content"})
    store.hold(state)
    store.hold(state)
    store.release(state)
    (_, folder) = store.folders(state)
    assert (folder / "a" / "b").read_bytes() == b"content"
    store.release(state)
    assert not folder.exists()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_any_depth_are_removed_and_not_measured(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    inner = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d" * 9, dir_fd=inner)
        deeper = os.open("d" * 9, os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)
    for read in (measure_folder, read_entries):
        with pytest.raises(InvalidArgument, match=r"levels|deeper"):
            read(top)
    remove_folder(top)
    assert list(tmp_path.iterdir()) == []


def test_measuring_counts_what_is_below(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"x" * 100_000)
    assert measure_folder(tmp_path) >= 100_000
    assert measure_folder(tmp_path / "nowhere") == 0


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidArgument, match="bytes"):
        read_entries(tmp_path)


def test_what_is_empty_takes_room_too(tmp_path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert measure_folder(tmp_path) >= 100 * 1024
    assert measure_folder(tmp_path, 10_000) < 20_000  # it does not look further
