"""Repositories as people lay them out: their tests run in a chat's box, and an upload finds the same."""

import contextlib
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from ostinato.flows.chat.workplace import open_workplace
from ostinato.infra.sandbox.discovery.checkout import describe_checkout
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.infra.serving.gateway.answers.workplaces import RepositoryWorkplaces
from ostinato.infra.serving.gateway.uploads.store import Uploads, UploadStore
from ostinato.tasks.problems.discovery.describing import describe_files, describe_source

CODE = "def double(number):\n    return 2 * number\n"
INIT = "from shop.prices import double\n"
TEST = "from shop import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
PACKAGE = {"shop/__init__.py": INIT, "shop/prices.py": CODE}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{path}": text for path, text in files.items()}


SETUP = (
    "from setuptools import find_packages, setup\nsetup(name='shop', packages=find_packages())\n"
)
UV = '[project]\nname = "shop"\n[build-system]\nrequires = ["uv_build"]\nbuild-backend = "uv_build"\n'
HATCH = '[project]\nname = "shop"\n[tool.pytest.ini_options]\naddopts = "-n 4 --cov=shop"\n'
POETRY = '[tool.poetry]\nname = "shop"\npackages = [{ include = "shop", from = "src" }]\n'
FLIT = '[project]\nname = "shop"\n[build-system]\nrequires = ["flit_core"]\n'
FIND = '[tool.setuptools.packages.find]\nwhere = ["python_code"]\n'
RULES = "[pytest]\npython_files = check_*.py\npython_functions = check_*\n"
# the first, third, sixth and ninth run by day: sources below src, a flat package, a namespace, several projects
LAYOUTS = {
    "uv": {"pyproject.toml": UV, **below("src", PACKAGE), "tests/test_a.py": TEST},
    "hatch": {"pyproject.toml": HATCH, **below("src", PACKAGE), "tests/unit/test_a.py": TEST},
    "setuptools flat": {"setup.py": SETUP, **PACKAGE, "shop/tests/test_a.py": TEST},
    "poetry": {"pyproject.toml": POETRY, **below("src", PACKAGE), "tests/a_test.py": TEST},
    "flit": {"pyproject.toml": FLIT, **PACKAGE, "tests/__init__.py": "", "tests/test_a.py": TEST},
    "namespace": {
        "pyproject.toml": UV,
        "src/acme/shop/__init__.py": "",
        "src/acme/shop/prices.py": CODE,
        "tests/test_a.py": TEST.replace("from shop", "from acme.shop.prices"),
    },
    "setuptools src": {
        "pyproject.toml": FIND,
        **below("python_code", PACKAGE),
        "test/test_a.py": TEST,
    },
    "single file": {"shop.py": CODE, "test_shop.py": TEST},
    "monorepo": {
        "README.md": "",
        **below("services/shop", {"pyproject.toml": UV, **below("src", PACKAGE)}),
        "services/shop/tests/test_a.py": TEST,
        **below("services/flat", {"pyproject.toml": UV, "kit/__init__.py": CODE}),
        "services/flat/tests/test_b.py": TEST.replace("from shop", "from kit"),
    },
    "tests beside code": {**PACKAGE, "shop/tests.py": TEST},
    "own rules": {
        "pytest.ini": RULES,
        **below("src", PACKAGE),
        "checks/check_a.py": TEST.replace("def test_", "def check_"),
    },
}


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def pack(root: Path, paths: Iterable[str], archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for path in paths:
            tar.add(root / path, path)
    return archive


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(4)
async def test_tests_of_every_layout_run_in_a_chat(name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "shop", LAYOUTS[name])
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    async with open_workplace(
        root, tmp_path / "copy", warm_tests=True, test_limit_seconds=60.0
    ) as work:
        assert work.warning == ""
        run_tests = work.environment.run_tests
        assert run_tests is not None
        report = await run_tests(work.environment.sandbox)
        assert report.passed, report
        assert len(report.outcomes) == (2 if name == "monorepo" else 1)
        imports = next(text for path, text in LAYOUTS[name].items() if "import double" in text)
        done = await work.environment.sandbox.exec(
            f"cd /tmp && PYTHONPATH=$PYTHONPATH:/repo python -c '{imports.splitlines()[0]}'", 30.0
        )
        assert done.exit_code == 0, done.output.decode()
        assert await work.pending() == {}
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(4)
def test_an_upload_has_the_layout_of_a_chat(name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "shop", LAYOUTS[name])
    archive = pack(root, LAYOUTS[name], tmp_path / "shop.tar.gz")
    store = UploadStore(tmp_path / "uploads", hours=1.0, bytes_per_tenant=1 << 20)
    upload = store.keep("acme", archive)
    repository = store.repository("acme", upload.upload_id)

    told = describe_checkout({path: text.encode() for path, text in LAYOUTS[name].items()})
    assert (repository.package_paths, repository.test_paths) == (
        told.package_paths,
        told.test_paths,
    )
    for path, text in told.generated_files.items():
        assert repository.files[path].decode() == text


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(4)
async def test_tests_of_every_layout_run_in_an_upload(name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "shop", LAYOUTS[name])
    store = UploadStore(tmp_path / "uploads", hours=1.0, bytes_per_tenant=1 << 20)
    upload = store.keep("acme", pack(root, LAYOUTS[name], tmp_path / "shop.tar.gz"))
    uploads = Uploads(store)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(uploads.close)
        place = await stack.enter_async_context(uploads.place("acme", upload.upload_id))
        await place.test_server.start()
        report = await place.test_server.run({}, place.test_server.tests, 60.0)
        assert report.passed, report
        assert len(report.outcomes) == (2 if name == "monorepo" else 1)


async def test_a_repository_whose_tests_cannot_be_collected_opens_with_a_warning(
    tmp_path: Path,
) -> None:
    files = {"shop.py": CODE, "test_shop.py": "import a_package_that_is_nowhere\n"}
    root = write(tmp_path / "shop", files)
    async with open_workplace(
        root, tmp_path / "copy", warm_tests=True, test_limit_seconds=60.0
    ) as work:
        assert "No module named 'a_package_that_is_nowhere'" in work.warning
        assert work.environment.run_tests is None
        assert await work.environment.sandbox.read("shop.py") == CODE.encode()


PLUGIN = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p shop_fixtures'\n",
    "shop_fixtures.py": "import pytest\n\n\n@pytest.fixture\ndef price():\n    return 2\n",
    "test_shop.py": "def test_price(price):\n    assert price == 2\n\n\ndef test_own():\n    pass\n",
}


async def test_a_plugin_that_is_not_loaded_is_named_at_each_door(tmp_path: Path) -> None:
    root = write(tmp_path / "shop", PLUGIN)
    async with open_workplace(
        root, tmp_path / "copy", warm_tests=True, test_limit_seconds=60.0
    ) as work:
        assert "not loaded in boxes: shop_fixtures;" in work.warning
        assert work.environment.run_tests is not None
    remarks = describe_source(str(root), None, tmp_path / "cache", 0).remarks
    assert "not loaded in boxes: shop_fixtures;" in " ".join(remarks)
    store = UploadStore(tmp_path / "uploads", hours=1.0, bytes_per_tenant=1 << 20)
    upload = store.keep("acme", pack(root, PLUGIN, tmp_path / "shop.tar.gz"))
    uploads = Uploads(store)
    workplaces = RepositoryWorkplaces(
        (), boxes_per_repository=1, test_limit_seconds=60.0, uploads=uploads
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(uploads.close)
        leased = workplaces.lease("acme", upload.upload_id, {}, None)
        environment = await stack.enter_async_context(leased)
        assert "not loaded in boxes: shop_fixtures;" in environment.warning


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(4)
def test_problems_have_the_import_root_and_the_tests_of_a_chat(name: str, tmp_path: Path) -> None:
    files = {path: text.encode() for path, text in LAYOUTS[name].items()}
    told = describe_checkout(files)
    inside = ""
    if name == "monorepo":  # problems are made of one project: its folder is named
        inside = "services/shop/"
        files = {path.removeprefix(inside): files[path] for path in files if inside in path}
    source = describe_files(files, "shop", tmp_path).source
    roots = {root.removeprefix("services/shop/") for root in told.import_roots} | {""}
    assert source.stripped_prefix in roots
    assert bool(source.stripped_prefix) == bool(told.import_roots)
    tests = {path.removeprefix(inside) for path in told.test_paths if path.startswith(inside)}
    assert {*source.test_paths} == tests


WRITES = """
import os
from pathlib import Path

from shop import double


def test_a_file_is_written():
    Path("report.txt").write_text(str(double(2)))
    Path(__file__).with_name("expected.txt").write_text("new")
    Path("made/deep").mkdir(parents=True)
    os.replace("report.txt", "made/deep/report.txt")
    assert Path("made/deep/report.txt").read_text() == "4"
    assert Path("tests/expected.txt").read_text() == "new"


def test_no_file_of_another_run_is_there():
    assert Path("tests/expected.txt").read_text() == "old"
"""


@pytest.mark.parametrize("door", ["chat", "upload"])
async def test_tests_write_into_their_repository_and_leave_nothing(
    door: str, tmp_path: Path
) -> None:
    files = {**below("src", PACKAGE), "tests/test_a.py": WRITES, "tests/expected.txt": "old"}
    root = write(tmp_path / "shop", files)
    async with contextlib.AsyncExitStack() as stack:
        if door == "chat":
            copy = tmp_path / "copy"
            work = await stack.enter_async_context(
                open_workplace(root, copy, warm_tests=True, test_limit_seconds=60.0)
            )
            server, box = work.place.test_server, work.environment.sandbox
        else:
            store = UploadStore(tmp_path / "uploads", hours=1.0, bytes_per_tenant=1 << 20)
            upload = store.keep("acme", pack(root, files, tmp_path / "shop.tar.gz"))
            uploads = Uploads(store)
            stack.push_async_callback(uploads.close)
            place = await stack.enter_async_context(uploads.place("acme", upload.upload_id))
            server, box = place.test_server, await place.lease()
        await server.start()
        for tests in (server.tests[:1], server.tests[1:]):
            report = await server.run({}, tests, 60.0)
            assert report.passed, report
        changed = {"src/shop/prices.py": b"def double(number):\n    return 0\n"}
        assert not (await server.run(changed, server.tests[:1], 60.0)).passed
        assert await box.diff() == {}
    assert {path: (root / path).read_text() for path in files} == files


async def test_a_judged_change_cannot_replace_what_its_tests_read(tmp_path: Path) -> None:
    files = {**PACKAGE, "tests/test_a.py": WRITES, "tests/expected.txt": "old"}
    root = write(tmp_path / "shop", files)
    server = TestServer(PreparedRepository.from_directory("shop", root, ("shop",), ("tests",)))
    await server.start()
    report = await server.run({}, server.tests[:1], 60.0)
    await server.close()
    assert report.first_failure is not None
    assert "Read-only file system" in report.first_failure.message


async def test_the_own_pytest_ini_stays_and_can_be_edited(tmp_path: Path) -> None:
    root = write(
        tmp_path / "shop", {**LAYOUTS["own rules"], "pytest.ini": RULES + "addopts = -ra\n"}
    )
    async with open_workplace(
        root, tmp_path / "copy", warm_tests=True, test_limit_seconds=60.0
    ) as work:
        shown = (await work.environment.sandbox.read("pytest.ini")).decode()
        assert "addopts = -ra" in shown
        await work.environment.sandbox.write("pytest.ini", shown.replace("-ra", "-q").encode())
        changes = await work.pending()
        assert work.conflicts([*changes]) == []
        work.keep(changes)
    assert "addopts = -q" in (root / "pytest.ini").read_text()


def test_a_large_monorepo_is_described_in_linear_time() -> None:
    files = {
        f"services/s{number:04}/{path}": text.encode()
        for number in range(1_500)
        for path, text in LAYOUTS["uv"].items()
    }
    began = time.process_time()
    assert len(describe_checkout(files).import_roots) == 1_500
    assert time.process_time() - began < 5.0  # a search per project and file took minutes


@pytest.mark.parametrize("warm_tests", [True, False])
@pytest.mark.parametrize(
    ("test", "warning"),
    [({}, "the repository has none"), ({"test_a.py": "import nowhere_at_all\n"}, "nowhere_at_all")],
)
async def test_a_chat_without_tests_opens_with_a_warning_in_every_dialect(
    test: dict[str, str], warning: str, *, warm_tests: bool, tmp_path: Path
) -> None:
    root = write(tmp_path / "shop", {"shop.py": CODE, **test})
    async with open_workplace(
        root, tmp_path / "copy", warm_tests=warm_tests, test_limit_seconds=60.0
    ) as work:
        assert work.warning.startswith("no test can be run here: ")
        assert warning in work.warning
        assert work.environment.run_tests is None
        assert (await work.environment.sandbox.exec("cat shop.py", 30.0)).output.decode() == CODE
