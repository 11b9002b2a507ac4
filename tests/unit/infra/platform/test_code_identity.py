"""Identity of code: import graph, what counts as a change, and what does not."""

import re
import tomllib
from pathlib import Path

import pytest

from ostinato.infra.platform.code_identity import (
    COMPUTING_PACKAGES,
    SourceTree,
    changed_files,
    installed_tree,
)
from ostinato.infra.platform.errors import ConfigError

MODULES = {
    "__init__.py": "",
    "tasks/__init__.py": "",
    "tasks/run.py": "from pkg.tasks import loss\nfrom pkg.tasks.table import ROWS\n",
    "tasks/loss.py": '"""Loss."""\n\ndef loss(x):\n    """Minus x."""\n    return -x  # down\n',
    "tasks/table.py": 'SHARD = "pkg.tasks.shard:main"\nROWS = {"a", "b", "c"}\n',
    "tasks/shard.py": "from pathlib import Path\n\nHERE = Path(__file__).parent / 'native'\n",
    "tasks/native/walk.c": "int main(void) { return 0; }\n",
    "tasks/other.py": "import pkg.tasks.run\n",
}
ENTRY = ("pkg.tasks.run:main",)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pkg"


def code_of(root: Path, cache: Path | None = None) -> dict[str, str]:
    return SourceTree(root, "pkg", cache).code_of(ENTRY)


def changes(root: Path, name: str, old: str, new: str) -> tuple[str, ...]:
    """What a replaced text changes."""
    before = code_of(root)
    path = root / name
    path.write_text(path.read_text().replace(old, new))
    return changed_files(before, code_of(root))


def test_closure_follows_imports_entries_in_strings_and_packages(root: Path) -> None:
    tree = SourceTree(root, "pkg")
    modules = {"pkg", "pkg.tasks", *(f"pkg.tasks.{name}" for name in ("loss", "table", "shard"))}

    assert tree.imports("pkg.tasks.run") == modules - {"pkg.tasks.shard"}
    assert tree.closure(ENTRY) == modules | {"pkg.tasks.run"}
    with pytest.raises(ConfigError, match=r"'pkg\.tasks\.gone:main' names no module"):
        tree.closure(["pkg.tasks.gone:main"])


def test_code_holds_sources_beside_a_module_that_names_their_folder(root: Path) -> None:
    assert {"tasks/loss.py", "tasks/native/walk.c"} <= code_of(root).keys()
    assert "tasks/other.py" not in code_of(root)


def test_what_a_run_compiles_beside_its_code_is_no_code(root: Path) -> None:
    before = code_of(root)
    compiled = root / "tasks" / "native" / "__pycache__" / "kernels.walk-1.py311.nbi"
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled on first use")
    assert code_of(root) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tasks/loss.py", "Minus x.", "The negative of x."),
        ("tasks/loss.py", "# down", "# towards lower reward"),
        ("tasks/loss.py", "\n\ndef", "\n\n\n\ndef"),
        ("tasks/other.py", "import", "import os\nimport"),
    ],
)
def test_prose_layout_and_other_modules_change_nothing(
    root: Path, name: str, old: str, new: str
) -> None:
    assert changes(root, name, old, new) == ()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tasks/loss.py", "return -x", "return +x"),
        ("tasks/table.py", '"b"', '"bb"'),
        ("tasks/native/walk.c", "return 0", "return 1"),
    ],
)
def test_a_change_of_what_runs_names_its_file(root: Path, name: str, old: str, new: str) -> None:
    assert changes(root, name, old, new) == (name,)


def test_a_new_import_brings_its_module(root: Path) -> None:
    (root / "tasks/extra.py").write_text("X = 1\n")

    found = changes(root, "tasks/loss.py", "def", "import pkg.tasks.extra\n\ndef")
    assert found == ("tasks/extra.py", "tasks/loss.py")


def test_versions_of_packages_are_told_with_both() -> None:
    assert changed_files({"torch": "2.1"}, {"torch": "2.2"}) == ("torch 2.1 -> 2.2",)


def test_cache_gives_the_same_and_a_torn_one_is_read_anew(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    fresh = code_of(root, cache)

    assert code_of(root, cache) == fresh
    cache.write_text(cache.read_text()[:-20])
    assert code_of(root, cache) == fresh


def test_digest_does_not_depend_on_the_order_of_a_set(root: Path) -> None:
    before = code_of(root)["tasks/table.py"]
    (root / "tasks/table.py").write_text(
        'SHARD = "pkg.tasks.shard:main"\nROWS = {"a", "b", "c"}\n\n# the same\n'
    )
    assert code_of(root)["tasks/table.py"] == before


def test_closures_of_the_project_load_no_torch_and_know_its_version() -> None:
    code = installed_tree().code_of(["ostinato.tasks.pretraining.run:main"])

    assert {"torch", "megatron-core", "models/training/optimizer.py"} <= code.keys()


def test_packages_of_developers_alone_are_no_part_of_it() -> None:
    """An installed wheel continues what the checkout that it was built from began."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    of_users = set().union(*(names for extra, names in extras.items() if extra != "dev"))
    assert not (extras["dev"] - of_users) & set(COMPUTING_PACKAGES.values())


def test_sets_that_ship_for_other_recipes_are_no_part_of_it() -> None:
    """Their own checksum is (`build_proven_problems`): a new set builds nothing of other recipes again."""
    code = installed_tree().code_of(("ostinato.tasks.problems.run:main",))
    assert "tasks/problems/shipped.py" in code
    assert not [name for name in code if "problems_16" in name]


def test_code_of_a_plug_in_of_any_kind_is_part_of_it_with_its_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "agents"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "loop.py"):
        (package / name).write_text(f"NAME = {name!r}\n")
    information = tmp_path / "site" / "agents-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: agents\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[ostinato.harnesses]\nmine = agents:NAME\n[ostinato.trackers]\nseen = agents:NAME\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    tree = SourceTree(root, "pkg", None)
    before = tree.code_of(ENTRY, {"mine", "seen"})
    assert "plug-in mine" in before
    assert "plug-in seen" not in before
    (package / "loop.py").rename(package / "inner" / "loop.py")
    after = tree.code_of(ENTRY, {"mine"})  # other names, as answers are cached by name
    assert {name for name in before if before[name] != after[name]} == {"plug-in mine"}
