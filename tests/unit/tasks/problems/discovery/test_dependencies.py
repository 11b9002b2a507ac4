"""Imports are compared by whole names with what distributions hold. The index is a folder of wheels made here."""

import zipfile
from pathlib import Path

import pytest

from ostinato.tasks.problems.discovery.describing import describe_source


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(folder: Path, name: str, files: dict[str, str], requires_python: str = "") -> None:
    stem = f"{name.replace('-', '_').replace('.', '_')}-1.0"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += f"Requires-Python: {requires_python}\n" if requires_python else ""
    told = {
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as packed:
        for path, text in {**files, **told}.items():
            packed.writestr(path, text)


def write_project(folder: Path, requirements: str, imports: str, files: dict[str, str]) -> Path:
    told = {
        "pyproject.toml": f"[project]\nname = 'acme.tools'\nversion = '1'\n{requirements}\n",
        "acme/tools/__init__.py": "def add(a, b):\n    return a + b\n",
        "tests/test_tools.py": f"{imports}\nfrom acme.tools import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
        **files,
    }
    for path, text in told.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


DECLARED = "__import__('pkg_resources').declare_namespace(__name__)\n"


@pytest.mark.parametrize(
    ("imports", "init"), [("import acme.parts.some", ""), ("from acme import parts", DECLARED)]
)
def test_another_part_of_the_own_namespace_is_fetched(
    tmp_path: Path, wheels: Path, imports: str, init: str
) -> None:
    make_wheel(wheels, "acme.parts", {"acme/parts/__init__.py": "", "acme/parts/some.py": ""})
    own = {"acme/__init__.py": init} if init else {}
    needed = "[project.optional-dependencies]\ntest = ['acme.parts']"
    project = write_project(tmp_path / "tools", needed, imports, own)

    found = describe_source(str(project), None, tmp_path / "cache", 0)

    assert found.remarks == ()
    assert found.repository.dependencies == ("acme.parts==1.0",)
    assert "acme/tools" in found.repository.package_paths


def test_a_part_that_nobody_names_is_told_by_its_whole_name(tmp_path: Path, wheels: Path) -> None:
    project = write_project(tmp_path / "tools", "", "from acme.gone import thing", {})
    [remark] = describe_source(str(project), None, tmp_path / "cache", 0).remarks
    assert remark.endswith(": acme.gone")


def test_a_wheel_that_nobody_imports_and_that_cannot_be_had_is_a_remark_at_most(
    tmp_path: Path, wheels: Path
) -> None:
    make_wheel(wheels, "held", {"held.py": ""})
    (wheels / "torn-1.0-py3-none-any.whl").write_bytes(b"no archive")
    needed = "dependencies = ['held', 'gone-runtime']\n[dependency-groups]\ndev = ['torn', 'gone', 'held']"
    project = write_project(tmp_path / "tools", needed, "import held\nimport unknown", {})

    found = describe_source(str(project), None, tmp_path / "cache", 0)

    assert found.repository.dependencies == ("held==1.0",)
    told = " | ".join(found.remarks)
    for name in ("gone-runtime left out", "torn left out", "gone left out", "unknown"):
        assert name in told
