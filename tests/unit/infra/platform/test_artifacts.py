"""Artifacts: identity by recipe and parents, the manifest as commit mark, damage found on the way
out.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts, fingerprint
from ostinato.infra.platform.errors import ConfigError, StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore

CODE = {"tasks/corpus/run.py": "a1"}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(f"file://{tmp_path}/objects")


@pytest.fixture
def artifacts(tmp_path: Path, objects: ObjectStore) -> Artifacts:
    return Artifacts(objects, Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate())


def _directory(tmp_path: Path, **files: str) -> Path:
    directory = tmp_path / "made"
    (directory / "deep").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / "deep" / name).write_text(text)
    return directory


def _publish(
    artifacts: Artifacts, directory: Path, recipe: object, parents: tuple[ArtifactRef, ...] = ()
) -> ArtifactRef:
    identity = artifacts.identify("corpus", "nano", recipe, CODE, parents)
    return artifacts.publish(identity, directory, {"tokens": 12})


@given(_JSON)
def test_fingerprint_ignores_key_order_only(value: object) -> None:
    pairs = {"b": value, "a": 1}
    turned = {"a": 1, "b": value}

    assert fingerprint(pairs) == fingerprint(turned)
    assert fingerprint({"b": value, "a": 2}) != fingerprint(pairs)


def test_fingerprint_of_a_model_is_that_of_its_json_and_its_parents() -> None:
    class Recipe(BaseModel):
        tokens: int

    parent = ArtifactRef(kind="k", name="n", version=1, fingerprint="f", object_prefix="p")
    elsewhere = parent.model_copy(update={"version": 9, "object_prefix": "q"})

    assert fingerprint(Recipe(tokens=3)) == fingerprint({"tokens": 3})
    assert fingerprint(Recipe(tokens=3), [parent]) != fingerprint(Recipe(tokens=3))
    assert fingerprint(Recipe(tokens=3), [parent]) == fingerprint(Recipe(tokens=3), [elsewhere])
    assert len(fingerprint(Recipe(tokens=3))) == 16


def test_fingerprint_of_a_setting_at_its_default_is_that_of_one_not_written() -> None:
    class Recipe(BaseModel):
        tokens: int
        later: int = 4

    assert fingerprint(Recipe(tokens=3, later=4)) == fingerprint({"tokens": 3})
    assert fingerprint(Recipe(tokens=3, later=5)) == fingerprint({"tokens": 3, "later": 5})


def test_identity_changes_with_code_and_lists_what_the_same_settings_made(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    directory = _directory(tmp_path, a="one")
    first = _publish(artifacts, directory, {"seed": 1})
    changed = artifacts.identify("corpus", "nano", {"seed": 1}, {"tasks/corpus/run.py": "b2"}, ())
    second = artifacts.publish(changed, directory)

    assert second.fingerprint != first.fingerprint
    assert [ref for ref, _ in artifacts.made_with(changed)] == [second, first]
    elsewhere = artifacts.identify("corpus", "nano", {"seed": 2}, CODE, ())
    assert artifacts.made_with(elsewhere) == []


def test_publish_then_fetch_gives_the_same_files(artifacts: Artifacts, tmp_path: Path) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one", b="two"), {"seed": 1})
    copy = artifacts.fetch(ref, tmp_path / "copy")

    assert (str(ref), ref.version) == ("corpus/nano@1", 1)
    assert (copy / "deep" / "a").read_text() == "one"
    assert (copy / "deep" / "b").read_text() == "two"
    assert artifacts.find("corpus", "nano", ref.fingerprint) == ref
    assert artifacts.metadata(ref) == {"tokens": 12}
    assert artifacts.get(str(ref)) == ref
    with pytest.raises(ConfigError, match=r"nano@7' is not in the ledger.*corpus/nano@1"):
        artifacts.get("corpus/nano@7")


def test_publish_of_a_known_fingerprint_keeps_the_first_content(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    first = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    again = _publish(artifacts, _directory(tmp_path, a="changed"), {"seed": 1})
    other = _publish(artifacts, _directory(tmp_path, a="changed"), {"seed": 2})

    assert again == first
    assert other.version == 2
    assert (artifacts.fetch(first, tmp_path / "copy") / "deep" / "a").read_text() == "one"


def test_kill_before_the_manifest_leaves_nothing_to_find(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    objects.delete(f"{ref.object_prefix}/artifact.json")

    assert artifacts.find("corpus", "nano", ref.fingerprint) is None
    with pytest.raises(StorageError, match="run its stage again"):
        artifacts.fetch(ref, tmp_path / "copy")


def test_kill_before_the_ledger_row_or_loss_of_the_ledger_is_mended(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path
) -> None:
    parent = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    child = _publish(artifacts, _directory(tmp_path, a="two"), {"seed": 2}, (parent,))
    empty = Ledger(f"sqlite:///{tmp_path}/new.db").migrate()
    mended = Artifacts(objects, empty)

    found = mended.find("corpus", "nano", child.fingerprint)
    assert found is not None
    assert found.object_prefix == child.object_prefix
    assert [ref.fingerprint for ref in mended.lineage(found)] == [parent.fingerprint]


def test_damaged_object_is_named_with_both_checksums(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    key = f"{ref.object_prefix}/files/deep/a"
    objects.put_bytes(key, b"rot")

    with pytest.raises(StorageError, match=f"{key}.*corrupt: checksum .*, wanted "):
        artifacts.fetch(ref, tmp_path / "copy")
    objects.put_bytes(f"{ref.object_prefix}/artifact.json", b"{}")
    with pytest.raises(StorageError, match=r"artifact\.json .*corrupt"):
        artifacts.find("corpus", "nano", ref.fingerprint)


@pytest.mark.parametrize("is_lost", [False, True])
def test_advice_for_a_damaged_artifact_works(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path, is_lost: bool
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    key = f"{ref.object_prefix}/files/deep/a"
    if is_lost:
        objects.delete(key)
    else:
        objects.put_bytes(key, b"")
    with pytest.raises(StorageError, match=f"delete {ref.object_prefix}/artifact.json in "):
        artifacts.fetch(ref, tmp_path / "copy")

    objects.delete(f"{ref.object_prefix}/artifact.json")
    assert artifacts.find(ref.kind, ref.name, ref.fingerprint) is None
    again = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    assert again == ref
    assert (artifacts.fetch(again, tmp_path / "copy") / "deep" / "a").read_text() == "one"


@pytest.mark.parametrize(
    "path",
    ["/etc/x", "../x", "a/../../x", "a//b", "", ".", "a\\..\\x", "a\0b", "x" * 300, "\ud800"],
)
def test_manifest_that_names_no_path_inside_is_refused(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path, path: str
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    key = f"{ref.object_prefix}/artifact.json"
    manifest = json.loads(objects.get_bytes(key))
    manifest["files"][0]["path"] = path
    objects.put_bytes(key, json.dumps(manifest).encode())
    with pytest.raises(StorageError, match="corrupt: 1 wrong fields"):
        artifacts.fetch(ref, tmp_path / "copy")


@pytest.mark.parametrize("changed", ["kind", "name", "fingerprint"])
def test_manifest_of_another_artifact_is_refused(
    artifacts: Artifacts, objects: ObjectStore, tmp_path: Path, changed: str
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one"), {"seed": 1})
    other = ref.model_copy(update={changed: "0123456789abcdef"})
    prefix = f"artifacts/{other.kind}/{other.name}/{other.fingerprint}"
    objects.put_bytes(
        f"{prefix}/artifact.json", objects.get_bytes(f"{ref.object_prefix}/artifact.json")
    )
    with pytest.raises(StorageError, match="belongs to artifacts/corpus/nano/"):
        artifacts.find(other.kind, other.name, other.fingerprint)


def test_fetch_mends_damaged_copies_and_leaves_whole_ones(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    ref = _publish(artifacts, _directory(tmp_path, a="one", b="two"), {"seed": 1})
    copy = artifacts.fetch(ref, tmp_path / "copy") / "deep"
    untouched = (copy / "b").stat().st_ino
    (copy / "a").write_text("eno")
    artifacts.fetch(ref, tmp_path / "copy")

    assert (copy / "a").read_text() == "one"
    assert (copy / "b").stat().st_ino == untouched


def test_lineage_is_nearest_first_and_each_once(artifacts: Artifacts, tmp_path: Path) -> None:
    directory = _directory(tmp_path, a="one")
    root = _publish(artifacts, directory, "root")
    left = _publish(artifacts, directory, "left", (root,))
    right = _publish(artifacts, directory, "right", (root,))
    top = _publish(artifacts, directory, "top", (left, right))

    assert artifacts.lineage(top) == (left, right, root)
    assert artifacts.lineage(root) == ()


def test_empty_directory_is_refused(artifacts: Artifacts, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="no file in"):
        _publish(artifacts, tmp_path / "empty", {"seed": 1})


def test_new_ledger_is_for_its_owner_alone(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/private.db").migrate()
    ledger.artifacts.list("corpus")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("private.db*")}
    assert modes["private.db"] == 0o600
    assert {mode for name, mode in modes.items() if not name.endswith("lock")} == {0o600}
