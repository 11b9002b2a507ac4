"""Refactorings are made backwards: the new name in place of the old one gives the original back."""

import ast
import re

import pytest

from ostinato.infra.platform.syntax import module_names
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.grading.change import AttemptChange
from ostinato.tasks.grading.cheating.left_names import left_names
from ostinato.tasks.grading.judging.old_names import find_old_name
from ostinato.tasks.problems.breaking.refactorings import (
    MOVE,
    RENAME,
    RefactoringMaker,
    propose_names,
    write_request,
)
from ostinato.tasks.problems.config import PromptLevel
from ostinato.tasks.problems.selection import Sources
from tests.fakes.table_project import FILES


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("tables"), {})


@pytest.fixture(scope="module")
def made(repository):
    return make(repository)


def prepare(folder, others):
    for path, text in {**FILES, "README.md": "Call `parse_rows(text)`.\n", **others}.items():
        place = folder / path.removeprefix("src/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return PreparedRepository.from_directory("tablekit", folder, ("tablekit",), ("tests",))


def make(repository):
    maker = RefactoringMaker(repository, Sources.read(repository).definitions)
    return {(one.operator, one.symbol): one for one in maker.candidates()}


def broken_texts(candidate, repository):
    files = {**repository.files, **candidate.broken_files(repository.files)}
    return {path: content.decode() for path, content in files.items()}


def test_the_new_name_in_place_of_the_old_one_gives_the_original(repository, made):
    renames = [one for (operator, _), one in made.items() if operator == RENAME]
    assert {one.symbol for one in renames} >= {"parse_rows", "pad_cell", "Table", "has_cell"}
    original = {path: content.decode() for path, content in repository.files.items()}
    for one in renames:
        old = one.facts["old_name"]
        assert not any(re.search(rf"\b{old}\b", text) for text in original.values())
        broken = broken_texts(one, repository)
        for text in (text for path, text in broken.items() if path.endswith(".py")):
            assert one.symbol not in {
                node.id for node in ast.walk(ast.parse(text)) if is_name(node)
            }
        back = {path: re.sub(rf"\b{old}\b", one.symbol, text) for path, text in broken.items()}
        assert back == original


def is_name(node):
    return isinstance(node, ast.Name)


def test_a_rename_changes_code_tests_docstrings_comments_exports_and_documents(repository, made):
    one = made[RENAME, "parse_rows"]
    assert {block.path for block in one.blocks} == {
        "tablekit/__init__.py", "tablekit/rows.py", "tablekit/report.py",
    }  # fmt: skip
    assert {block.path for block in one.adapted_tests} == {"README.md", "tests/test_rows.py"}
    broken = broken_texts(one, repository)
    assert not any("parse_rows" in text for text in broken.values())
    problem = one.draft(repository.fingerprint)
    assert problem.num_changed_lines == 8
    assert problem.old_place == ("tablekit/rows.py", one.facts["old_name"])


def test_a_moved_definition_is_in_the_other_module_with_its_comments_and_all_imports(
    repository, made
):
    moves = [one for (operator, _), one in made.items() if operator == MOVE]
    # strip_cell: where it could come from, the original imports it, so an alias there would be right
    assert {one.symbol for one in moves} == {"pad_cell", "find_cell"}
    for one in moves:
        assert one.symbol not in module_names(repository.files[one.facts["old_path"]].decode())
        broken = broken_texts(one, repository)
        trees = {path: ast.parse(broken[path]) for path in broken if path.endswith(".py")}
        holders = [
            path
            for path, tree in trees.items()
            if any(
                isinstance(node, ast.FunctionDef) and node.name == one.symbol for node in tree.body
            )
        ]
        assert holders == [one.facts["old_path"]]
        module = one.facts["old_path"].removesuffix(".py").replace("/", ".")
        sources = {
            node.module
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and one.symbol in {it.name for it in node.names}
        }
        assert sources == {module}


@pytest.mark.parametrize(
    ("symbol", "operators"),
    [
        ("close", ()),  # `table.close()` is an attribute of an unknown object
        ("count_cells", ()),  # a text names it
        ("parse_rows", (RENAME,)),  # `rows.parse_rows` names its module
    ],
)
def test_definitions_with_uses_that_could_mean_something_else_are_left_out(made, symbol, operators):
    assert tuple(operator for operator in (RENAME, MOVE) if (operator, symbol) in made) == operators


@pytest.mark.parametrize(
    "other",
    [
        {"tests/test_more.py": "def pad(pad_cell):\n    return pad_cell\n"},
        {"tests/test_more.py": "def pad(rows):\n    return rows.pad_cell\n"},
        {"tests/test_more.py": "NAME = 'pad_cell'\n"},
        {"tests/test_more.py": "def pad_cell():\n    return 1\n"},
        {
            "setup.cfg": "[options.entry_points]\nconsole_scripts =\n    pad = tablekit.cells:pad_cell\n"
        },
    ],
)
def test_one_doubtful_use_anywhere_leaves_a_definition_out(tmp_path, other):
    made = make(prepare(tmp_path, other))
    assert (RENAME, "pad_cell") not in made
    assert (RENAME, "strip_cell") in made


def test_candidates_of_several_files_and_many_lines_come_first(repository, made):
    for operator in (RENAME, MOVE):
        own = [one for one in made.values() if one.operator == operator]
        sizes = [len({block.path for block in one.blocks}) > 1 for one in own]
        assert sizes == sorted(sizes, reverse=True)
    assert [one.operator for one in made.values()][:4] == [RENAME, MOVE] * 2
    assert list(make(repository)) == list(made)


def test_names_are_synonyms_in_the_style_of_the_name():
    assert set(propose_names("parse_rows", ["_text"], "0")) == {
        "read_rows", "load_rows", "rows_parse", "parse_rows_text",
    }  # fmt: skip
    assert "ParseFailure" in set(propose_names("ParseError", ["Object"], "0"))
    assert list(propose_names("slugify", ["_text"], "0")) == ["slugify_text"]


def test_every_wording_names_the_old_and_the_new_place(made):
    for one in made.values():
        for level in PromptLevel:
            text = write_request(one, level)
            wanted = (one.facts["old_name"], one.symbol, one.facts["old_path"], one.path)
            parts = wanted[:2] if one.operator == RENAME else wanted[1:]
            assert all(part in text for part in parts), text
        assert len(write_request(one, PromptLevel.TERSE)) <= 80 or one.operator == MOVE


@pytest.mark.parametrize("place", [(RENAME, "parse_rows"), (RENAME, "Table"), (MOVE, "pad_cell")])
def test_every_cheat_leaves_a_sign_of_the_old_name_and_the_original_none(
    runner, repository, made, place
):
    problem = made[place].draft(repository.fingerprint)
    cheats = left_names(problem, repository)
    assert len(cheats) == 6
    for name, files in cheats.items():
        found = runner.run(find_old_name(problem, files, repository))
        assert found.startswith("the old name is left: "), name
    assert runner.run(find_old_name(problem, {}, repository)) == ""


def test_adapted_tests_are_no_edit_of_tests(repository, made):
    problem = made[RENAME, "parse_rows"].draft(repository.fingerprint)
    other = {"tests/test_rows.py": b"# adapted\n", "tests/test_cells.py": b"# weakened\n"}
    change = AttemptChange.of(problem, other, repository)
    assert change.changed_tests == ("tests/test_cells.py",)
