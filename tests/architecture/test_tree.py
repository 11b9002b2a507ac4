"""What no file may be called, hold or import."""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGES, ROOT, list_files, list_modules, parse

FORBIDDEN_STEMS = {"util", "utils", "helper", "helpers", "common", "misc", "base"}
# written apart, so that this file does not match itself
MACHINE_PATHS = re.compile(
    "|".join([r"/wor" + r"k/", r"/roo" + r"t/", r"/tmp/pla" + r"n\b", r"/opt/whee" + r"ls"])
)
MARKS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
HELP_MODULES_MAXIMUM = 200  # of ours
MAXIMUM_FILE_BYTES = 11 * 2**20
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".html",
    ".json",
    ".cfg",
    ".ini",
    "",
}


def test_no_file_is_named_after_nothing() -> None:
    stems = {name: name.rpartition("/")[2].partition(".")[0] for name in list_modules()}

    assert [name for name, stem in stems.items() if stem in FORBIDDEN_STEMS] == []


def test_every_module_says_what_it_owns() -> None:
    silent = [
        name
        for name in list_modules()
        if (tree := parse(name)).body and not ast.get_docstring(tree)
    ]

    assert silent == []


def _text_files() -> list[str]:
    return [
        name
        for name in list_files()
        if "." + name.rpartition(".")[2] in TEXT_SUFFIXES or "." not in name
    ]


def test_no_tracked_file_names_a_place_of_one_machine() -> None:
    found = []
    for name in _text_files():
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")

    assert found == []


def test_no_source_carries_an_unnumbered_mark() -> None:
    found = [
        f"{name}:{number}"
        for name in list_modules(with_tests=True)
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if MARKS.search(line) and not re.search(r"#\d+", line)
    ]

    assert found == []


def test_marks_stand_in_the_files_that_ci_gives_to_pytest() -> None:
    """.ci/run and .ci/beside find what runs alone and virtual machines by text, to import no others."""
    marked = re.compile(r"mark\.(?:alone|microvm)\b")
    found = {
        name
        for name in list_modules(with_tests=True)
        if not name.rpartition("/")[2].startswith("test_")
        and marked.search((ROOT / name).read_text())
    }

    assert found == {"tests/contracts/sandbox_backends.py"}


def test_no_tracked_file_is_huge() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in list_files()}

    assert {name: size for name, size in sizes.items() if size > MAXIMUM_FILE_BYTES} == {}


def test_environment_is_read_in_settings_only() -> None:
    # those after the first start other programs and pass the environment on; `inside` runs in the
    # box, where infra cannot be imported
    allowed = (
        "infra/platform/settings.py",
        "infra/platform/cluster/",
        "infra/platform/git.py",
        "infra/platform/packages.py",
        "infra/sandbox/inside/",
        "flows/cli.py",
        "flows/operating/local_prefect.py",
    )
    found = []
    for name in list_modules():
        for node in ast.walk(parse(name)):
            if not isinstance(node, ast.Attribute) or name.startswith(allowed):
                continue
            if node.attr in ("environ", "getenv"):
                found.append(f"{name}:{node.lineno}")

    assert found == []


@functools.cache
def _suppliers() -> Mapping[str, list[str]]:
    """Distributions by the top-level names that they install."""
    return importlib.metadata.packages_distributions()


def test_no_flow_file_hides_an_installed_module() -> None:
    # Prefect's loader puts the folder of a flow first on the import path
    stems = {name.removeprefix("flows/")[:-3] for name in list_modules() if name.count("/") == 1}
    installed = set(_suppliers()) | set(sys.stdlib_module_names)

    assert sorted((stems - set(PACKAGES) - {"__init__"}) & installed) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_supplies_our_names(package: str) -> None:
    suppliers = set(_suppliers().get(package, ()))

    assert suppliers <= {"ostinato"}


# Modules with what each must not load, in the order in which one process imports them: what a module may load, no later
# one of its list forbids.
LIGHT_IMPORTS = {
    "first": [
        ("infra.platform.settings", "torch ray prefect sqlalchemy s3fs megatron"),
        ("infra.platform.cluster.child", "torch ray prefect sqlalchemy s3fs megatron"),
        ("tasks.records", "torch ray prefect sqlalchemy megatron"),
        ("infra.platform.cluster.child_main", "torch ray prefect sqlalchemy megatron"),
    ],
    # who coordinates, rolls out or decodes starts without what only trainers need
    "without torch": [
        ("infra.platform.artifacts", "torch ray prefect megatron s3fs"),
        ("flows.recipe", "torch ray prefect megatron"),
        ("models.decode.protocol", "torch ray prefect megatron"),
        ("tasks.evaluation.checkpoint.run", "torch ray megatron scipy.stats"),
        ("tasks.rollout.actor", "torch megatron scipy.stats"),
        ("tasks.rollout.graded_worker", "torch megatron scipy.stats"),
    ],
    "without Megatron": [
        ("tasks.evaluation.checkpoint.shard", "megatron ray s3fs scipy.stats"),
        ("models.decode.compiled.native", "megatron"),
        ("tasks.reinforcement.run", "megatron"),
    ],
    # Megatron-core decorates with torch.compile, whose compiler a CPU never calls
    "without a compiler": [
        ("tasks.pretraining.run", "torch._dynamo torch._inductor"),
        ("tasks.pretraining.mtp.run", "torch._dynamo torch._inductor"),
        ("tasks.reinforcement.learning.actor", "torch._dynamo torch._inductor"),
        ("tasks.corpus.run", "torch._dynamo torch._inductor"),
        ("tasks.realtime.cycle_training", "torch._dynamo torch._inductor"),
    ],
}


@pytest.mark.parametrize("modules", LIGHT_IMPORTS.values(), ids=LIGHT_IMPORTS)
@pytest.mark.sampled(2)
def test_imports_load_nothing_heavy(modules: list[tuple[str, str]]) -> None:
    program = (
        "import importlib, sys\n"
        f"for name, heavy in {modules!r}:\n"
        "    importlib.import_module('ostinato.' + name)\n"
        "    print(name, *(set(heavy.split()) & set(sys.modules)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [name for name, _ in modules]


def test_flows_import_without_torch_megatron_and_numba() -> None:
    modules = [
        "ostinato." + name[:-3].replace("/", ".")
        for name in list_modules()
        if name.startswith("flows/") and not name.endswith("__init__.py")
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    print(*{'torch', 'megatron', 'numba'} & set(sys.modules), name)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert [line for line in answer.stdout.splitlines() if len(line.split()) > 1] == []


@pytest.mark.parametrize(
    ("typed", "code", "allowed"),
    [("--help", 0, set()), ("demoo", 2, set()), ("status", 0, {"scipy", "sqlalchemy"})],
)
def test_what_is_typed_often_loads_few_modules_and_none_that_computes(
    typed: str, code: int, allowed: set[str], tmp_path: Path
) -> None:
    heavy = {
        "torch",
        "prefect",
        "scipy",
        "scipy.stats",
        "sqlalchemy",
        "matplotlib",
        "ray",
        "fastapi",
    }
    program = (
        "import sys; from typer.testing import CliRunner; from ostinato.flows.cli import app\n"
        f"assert CliRunner().invoke(app, [{typed!r}]).exit_code == {code}\n"
        "print(sum(name.startswith('ostinato.') for name in sys.modules))\n"
        f"print(*{heavy - allowed} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"OSTINATO_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    count, heavy = answer.stdout.split("\n")[:2]
    assert int(count) <= HELP_MODULES_MAXIMUM
    assert heavy == ""
