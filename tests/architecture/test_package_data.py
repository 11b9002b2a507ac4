"""A wheel holds what the packages read at run time: C sources, recipes, templates, weights."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = frozenset({".py", ".pyc", ".pyi"})


def test_every_file_of_a_package_is_code_or_named_as_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = project["package-data"]["*"]
    packages = [pattern.rstrip("*") for pattern in project["packages"]["find"]["include"]]
    missing = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in CODE
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert missing == []
    assert any(path.suffix == ".c" for path in (ROOT / "infra").rglob("*"))
