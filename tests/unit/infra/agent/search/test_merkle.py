"""Merkle law: equal roots and equal files are the same thing, and the difference is what differs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.infra.agent.search.merkle import MerkleTree, hash_content

PATHS = st.sampled_from(["a", "b/a", "b/c/d", "b/c/e", "f/a", "b.x"])
HASHES = st.sampled_from([hash_content(bytes([value])) for value in range(3)])
FILES = st.dictionaries(PATHS, HASHES)
CHANGES = st.dictionaries(PATHS, st.one_of(st.none(), HASHES))


@settings(deadline=None)
@given(first=FILES, second=FILES)
def test_roots_are_equal_just_when_the_files_are(first, second) -> None:
    trees = MerkleTree.from_files(first), MerkleTree.from_files(second)

    assert (trees[0].digest == trees[1].digest) == (first == second)


@settings(deadline=None)
@given(first=FILES, second=FILES)
def test_changed_paths_are_those_that_differ(first, second) -> None:
    changed = list(MerkleTree.from_files(first).changed_paths(MerkleTree.from_files(second)))

    assert changed == sorted(
        path for path in first.keys() | second.keys() if first.get(path) != second.get(path)
    )


@settings(deadline=None)
@given(files=FILES, changes=CHANGES)
def test_an_updated_tree_is_the_tree_of_the_updated_files(files, changes) -> None:
    after = {path: value for path, value in {**files, **changes}.items() if value is not None}

    assert MerkleTree.from_files(files).updated(changes) == MerkleTree.from_files(after)


def test_folders_that_did_not_change_are_shared() -> None:
    tree = MerkleTree.from_files({"b/a": hash_content(b"1"), "f/a": hash_content(b"2")})

    assert tree.updated({"b/a": hash_content(b"3")}).folders["f"] is tree.folders["f"]


def test_a_file_and_a_folder_of_one_name_differ() -> None:
    inner = MerkleTree.from_files({"x": hash_content(b"1")})

    assert (
        MerkleTree.from_files({"a": inner.digest}).digest
        != MerkleTree.from_files({"a/x": hash_content(b"1")}).digest
    )
