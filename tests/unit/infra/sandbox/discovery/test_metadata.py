"""Static facts of projects, from each of the files that state them."""

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.discovery.metadata import read_metadata


def test_pyproject() -> None:
    found = read_metadata(
        {
            "pyproject.toml": b"""
[project]
name = "shop"
version = "1.2"
dependencies = ["six>=1", "tomli; python_version < '3.5'"]
[project.optional-dependencies]
test = ["freezegun", "pytest-mock"]
docs = ["sphinx"]
[dependency-groups]
dev = ["pretend", {include-group = "test"}]
[tool.pytest.ini_options]
python_files = "check_*.py other.py"
[tool.setuptools_scm]
version_file = "src/shop/_version.py"
"""
        },
        "folder",
    )

    assert (found.name, found.version) == ("shop", "1.2")
    assert found.requires == ("six>=1",)
    assert found.test_requires == ("freezegun", "pytest-mock", "pretend")
    assert found.rules.python_files == ("check_*.py", "other.py")
    assert found.version_files == ("src/shop/_version.py",)


def test_groups_of_tests_hold_the_groups_that_they_include() -> None:
    text = b"""
[dependency-groups]
Base_Tools = ["mock"]
more = [{include-group = "base-tools"}, "pretend"]
test = ["six", {include-group = "more"}]
docs = ["sphinx"]
dev = ["attrs", {include-group = "gone"}]
ci = [{include-group = "ci"}, "coverage"]
"""
    found = read_metadata({"pyproject.toml": text}, "folder")
    # a group that includes nothing there is, or itself, keeps its own lines
    assert set(found.test_requires) == {"six", "mock", "pretend", "attrs", "coverage"}


def test_metadata_of_a_source_distribution_wins() -> None:
    found = read_metadata(
        {
            "PKG-INFO": b"Name: Shop\nVersion: 3\nRequires-Dist: six\nRequires-Dist: mock; extra == 'tests'\n\ntext",
            "setup.cfg": b"[options]\ninstall_requires =\n    other\n",
            "Shop.egg-info/top_level.txt": b"shop\n_shop\n",
        },
        "folder",
    )

    assert (found.name, found.version, found.requires) == ("Shop", "3", ("six",))
    assert found.test_requires == ("mock",)
    assert found.top_level == ("shop", "_shop")


def test_setup_cfg_tox_and_requirement_files() -> None:
    found = read_metadata(
        {
            "setup.cfg": b"[metadata]\nname = shop\n[options]\ninstall_requires =\n    six\n"
            b"[options.extras_require]\ntesting =\n    mock>=1\n",
            "tox.ini": b"[testenv]\ndeps =\n    pytest\n    py311: freezegun\n    -r requirements.txt\n",
            "requirements-dev.txt": b"# of developers\npretend==1.0.9  # spies\n-e .\n",
        },
        "folder",
    )

    assert found.requires == ("six",)
    assert found.test_requires == ("mock>=1", "pytest", "freezegun", "pretend==1.0.9")


def test_setup_py_is_read_and_not_run() -> None:
    found = read_metadata(
        {
            "setup.py": b"import sys\nneeded = ['six']\nsys.exit('ran')\n"
            b"setup(name='shop', version=str(1), install_requires=needed + ['attrs'], py_modules=['shop'],\n"
            b"      extras_require={'tests': ['mock'], 'docs': ['sphinx']})\n"
        },
        "folder",
    )

    assert (found.name, found.version, found.top_level) == ("shop", "0", ("shop",))
    assert (found.requires, found.test_requires) == (("six", "attrs"), ("mock",))


def test_requirements_that_an_older_build_wrote_down() -> None:
    text = b"six\n\n[test]\nmock\n\n[:python_version < '3']\nenum34\n"

    found = read_metadata(
        {"PKG-INFO": b"Name: shop\n", "shop.egg-info/requires.txt": text}, "folder"
    )

    assert (found.requires, found.test_requires) == (("six",), ("mock",))


def test_nothing_stated_takes_the_name_of_the_folder() -> None:
    found = read_metadata({}, "folder")

    assert (found.name, found.version, found.requires) == ("folder", "0", ())


def test_a_file_that_does_not_parse_is_named() -> None:
    with pytest.raises(ProblemError, match=r"pyproject\.toml is not TOML"):
        read_metadata({"pyproject.toml": b"[project"}, "folder")
    for name, text in (("setup.cfg", b"[metadata\n"), ("pytest.ini", b"testpaths = tests\n")):
        with pytest.raises(ProblemError, match=f"{name} does not parse") as refused:
            read_metadata({name: text}, "folder")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "[tool.setuptools.packages.find]\nwhere = ['code']\ninclude = ['acme*']",
        "[tool.setuptools]\npackages = ['acme', 'acme.tools']\npackage-dir = {'' = 'code'}",
    ],
)
def test_builds_state_packages_and_their_folder(text: str) -> None:
    found = read_metadata({"pyproject.toml": text.encode()}, "folder")
    assert found.import_roots == ("code",)
    assert "acme" in found.top_level


def test_a_legacy_build_states_its_folder() -> None:
    text = b"[options]\npackage_dir =\n    = code\n[options.packages.find]\nwhere = code\n"
    assert read_metadata({"setup.cfg": text}, "folder").import_roots == ("code",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("setup.cfg", b"[options]\ninstall_requires = file: reqs/base.txt, more.txt\n"),
        (
            "pyproject.toml",
            b'[tool.setuptools.dynamic]\ndependencies = {file = ["reqs/base.txt", "more.txt"]}',
        ),
    ],
)
def test_requirements_that_a_build_reads_from_files(name: str, text: bytes) -> None:
    """`file: NAME` is no package, though a stranger may have one of that name on the index."""
    files = {"reqs/base.txt": b"-r deeper.txt\nsix", "more.txt": b"attrs\n-r more.txt\n"}
    files["reqs/deeper.txt"] = b"mock==1 \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd\n"
    found = read_metadata({name: text, **files}, "folder")
    assert found.requires == ("mock==1", "six", "attrs")


def test_a_project_without_metadata_states_requirements_in_its_file() -> None:
    found = read_metadata({"requirements.txt": b"six --hash=sha256:ab\n-e .\n"}, "folder")
    assert found.test_requires == ("six",)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_requirement_files_with_a_byte_order_mark(encoding: str) -> None:
    found = read_metadata({"requirements-dev.txt": "mock\nsix\n".encode(encoding)}, "folder")
    assert found.test_requires == ("mock", "six")


def test_poetrys_dependencies_in_folders_and_repositories_are_none_of_the_index() -> None:
    text = b"""
[tool.poetry.dependencies]
python = "^3.11"
six = "^1.0"
attrs = {version = "^1", optional = true}
ours = {path = "../ours"}
theirs = {git = "https://example.org/theirs"}
[tool.poetry.group.test.dependencies]
mock = "*"
fixtures = {path = "../fixtures", develop = true}
"""
    found = read_metadata({"pyproject.toml": text}, "folder")
    assert (found.requires, found.test_requires) == (("six", "attrs"), ("mock",))


@pytest.mark.parametrize("path", ["/etc/outside.py", "../../outside.py", "a/../../outside.py"])
def test_a_version_module_outside_the_project_is_left_out(path: str) -> None:
    text = f'[tool.setuptools_scm]\nwrite_to = "{path}"\nversion_file = "./src/shop/_version.py"\n'
    found = read_metadata({"pyproject.toml": text.encode()}, "folder")
    assert found.version_files == ("src/shop/_version.py",)
