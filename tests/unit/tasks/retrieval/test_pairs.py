"""Questions and answers out of code, without the answer in the question's reach."""

import tarfile
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.retrieval.config import (
    STANDARD_LIBRARY,
    CodePackage,
    PairsConfig,
    RetrievalConfig,
)
from ostinato.tasks.retrieval.pairs import functions_of, make_pairs, read_package, remove_duplicates

SOURCE = '''
class Box:
    def split_in_half(self, items):
        """Cut a sequence into two.

        More words.
        """
        middle = len(items) // 2
        return items[:middle], items[middle:]


if True:
    async def load(path):
        return path
'''


def test_functions_come_without_their_docstring() -> None:
    box, load = functions_of("pkg", "a.py", SOURCE)

    assert (box.name, box.summary) == ("Box.split_in_half", "Cut a sequence into two.")
    assert "Cut a sequence" not in box.code.body
    assert "middle = len(items)" in box.code.body
    assert (load.name, load.summary) == ("load", "")


def test_pairs_of_names_hide_the_name() -> None:
    config = PairsConfig(least_query_words=2, least_body_lines=2, name_ratio=1.0)
    pairs = make_pairs(functions_of("pkg", "a.py", SOURCE), config, np.random.default_rng(0))
    by_query = {pair.query: pair.code for pair in pairs}

    assert set(by_query) == {"Cut a sequence into two.", "box split in half"}
    assert "split_in_half" in by_query["Cut a sequence into two."].body
    assert "split_in_half" not in "".join(by_query["box split in half"])


def test_copies_of_what_measures_are_not_taught() -> None:
    functions = functions_of("pkg", "a.py", SOURCE)
    copied = functions_of("fork", "b.py", SOURCE.replace("    ", "  "))

    assert remove_duplicates(copied, functions) == []
    assert remove_duplicates(copied, []) == copied


def test_an_installed_package_is_read_and_another_is_refused(tmp_path: Path) -> None:
    assert len(read_package("tenacity", tmp_path)) > 20
    with pytest.raises(ConfigError, match="'no_such_package' is not installed"):
        read_package("no_such_package", tmp_path)


def test_a_pinned_archive_is_read_as_the_installed_package_is(tmp_path: Path) -> None:
    folder = tmp_path / "tenacity-1.0"
    folder.mkdir()
    spec = util.find_spec("tenacity")
    assert spec is not None
    assert spec.submodule_search_locations
    with tarfile.open(folder / "tenacity-1.0.tar.gz", "w:gz") as tar:
        tar.add(spec.submodule_search_locations[0], "tenacity-1.0/src/tenacity")
        tar.add(__file__, "tenacity-1.0/setup.py")
    pinned = CodePackage(name="tenacity", version="1.0", folder="src/tenacity")
    assert read_package(pinned, tmp_path) == read_package("tenacity", tmp_path)
    astray = pinned.model_copy(update={"folder": "tenacity"})
    with pytest.raises(ConfigError, match=r"tenacity==1.0 holds no files in 'tenacity'"):
        read_package(astray, tmp_path)


def test_shipped_packages_are_pinned_whole_and_apart() -> None:
    config = RetrievalConfig()
    packages = [
        package
        for use in (config.train_packages, config.validation_packages, config.held_out_packages)
        for package in use
        if package != STANDARD_LIBRARY
    ]
    assert len(packages) > 20
    for package in packages:
        assert isinstance(package, CodePackage)
        assert len(package.sha256) == 64
    assert RetrievalConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_package_cannot_both_teach_and_measure() -> None:
    with pytest.raises(ValueError, match="'click' is in train_packages and in held_out_packages"):
        RetrievalConfig(train_packages=("click",), held_out_packages=("click",))
