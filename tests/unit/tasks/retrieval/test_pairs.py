"""Questions and answers out of code, without the answer in the question's reach."""

import numpy as np
import pytest

from infra.errors import ConfigError
from tasks.retrieval.config import PairsConfig, RetrievalConfig
from tasks.retrieval.pairs import functions_of, make_pairs, read_package, without_copies

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

    assert without_copies(copied, functions) == []
    assert without_copies(copied, []) == copied


def test_an_installed_package_is_read_and_another_is_refused() -> None:
    assert len(read_package("tenacity")) > 20
    with pytest.raises(ConfigError, match="'no_such_package' is not installed"):
        read_package("no_such_package")


def test_a_package_cannot_both_teach_and_measure() -> None:
    with pytest.raises(ValueError, match="'click' is in train_packages and in held_out_packages"):
        RetrievalConfig(train_packages=("click",), held_out_packages=("click",))
