"""Suites: slices follow from rules alone, a folder comes back as it was written, and a changed one is refused."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.tasks.problems.suites import (
    SLICES,
    SUITE_FILE,
    SUMS_FILE,
    SliceRule,
    assign_slices,
    choose_problems,
    read_card,
    read_suite,
    write_files,
    write_suite,
)
from ostinato.tasks.records import BlockEdit, Problem, Split
from tests.fakes.miniature import make_problem_set
from tests.fakes.rollouts import make_problem

KINDS = {
    "mutation": "bug", "combined": "bug", "multi_place": "bug", "deleted_function": "feature",
    "deleted_feature": "feature", "refactoring": "refactor", "missing_tests": "tests", "question": "question",
    "no_edit": "no_edit", "mined_commit": "commit", "mined_merge": "commit", "given": "given",
}  # fmt: skip


def make(kind: str, lines: int = 0, level: str = "") -> Problem:
    block = BlockEdit(path="pkg/code.py", first_line=5, gold_lines=("x",) * lines, broken_lines=())
    changes = {"kind": kind, "blocks": (block,) if lines else (), "prompt_level": level}
    return make_problem(f"{kind}-{lines}-{level}").model_copy(update=changes)


def test_slices_by_kind_share_no_problem_and_hold_every_known_kind() -> None:
    problems = [make(kind) for kind in KINDS]
    slices = assign_slices(problems, SLICES)
    assert {one: name for name, ids in slices.items() for one in ids} == {
        problem.problem_id: KINDS[problem.kind] for problem in problems
    }
    assert sum(map(len, slices.values())) == len(problems)
    assert assign_slices([make("an-environment")], SLICES) == {}


def test_long_and_vague_overlap_with_the_kinds() -> None:
    short, long = make("combined", 99), make("combined", 100)  # and the line of the edit
    assert (short.num_changed_lines, long.num_changed_lines) == (100, 101)
    vague = make("refactoring", 0, "vague")
    slices = assign_slices([short, long, vague, make("an-environment", 0, "terse")], SLICES)
    assert slices == {
        "bug": (short.problem_id, long.problem_id),
        "refactor": (vague.problem_id,),
        "long": (long.problem_id,),
        "vague": (vague.problem_id,),
    }


def test_drawn_problems_depend_on_nothing_but_their_ids() -> None:
    problems = [make_problem(f"p{number}") for number in range(9)]  # mutations
    problems += [make("given"), make("an-environment")]
    drawn = choose_problems(problems, SLICES, 3)
    assert drawn == choose_problems(problems[::-1], SLICES, 3)
    assert [problem.kind for problem in drawn] == ["given", "mutation", "mutation", "mutation"]
    assert len(choose_problems(problems, SLICES, None)) == 10


def write(tmp_path: Path) -> Path:
    source = make_problem_set(tmp_path / "set", Split.HELD_OUT)
    lines = (source / "problems.jsonl").read_text().splitlines()
    problems = [Problem.model_validate_json(line) for line in lines]
    (source / "repositories/pkg/files/pkg/__pycache__").mkdir()
    (source / "repositories/pkg/files/pkg/__pycache__/code.pyc").write_bytes(b"x")
    write_suite(source, tmp_path / "suite", problems, "tiny", 3)
    return tmp_path / "suite"


def test_a_suite_is_read_as_it_was_written_and_its_copy_is_the_same_suite(tmp_path: Path) -> None:
    folder = write(tmp_path)
    card, files = read_suite(folder)
    assert (card.name, card.version, card.problems) == ("tiny", 3, 4)
    assert card.slices == {"bug": SLICES["bug"]}
    assert card.title.startswith("tiny@3-")
    assert "repositories/pkg/files/pkg/code.py" in files
    assert not [path for path in files if "__pycache__" in path]
    write_files(tmp_path / "copy", card, files)
    assert read_suite(tmp_path / "copy") == (card, files)
    command = ["sha256sum", "--check", "--strict", SUMS_FILE]
    assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0


def test_a_suite_replaces_no_folder(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with pytest.raises(ProblemError, match="is not empty, wanted a new folder"):
        write_suite(tmp_path / "set", folder, [], "tiny", 3)


CODE = "repositories/pkg/files/pkg/code.py"


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda folder: (folder / CODE).write_text("pass\n"), CODE),
        (lambda folder: (folder / CODE).unlink(), CODE),
        (lambda folder: (folder / "repositories/pkg/more.py").write_text(""), "pkg/more.py"),
        (lambda folder: (folder / "repositories/pkg/repository.json").write_text("{}"), "repository.json"),
        (lambda folder: (folder / "problems.jsonl").write_text(""), "problems.jsonl"),
        (lambda folder: (folder / SUMS_FILE).unlink(), CODE),
    ],
    ids=["changed", "removed", "added", "manifest", "problems", "sums"],
)  # fmt: skip
def test_a_changed_file_is_refused_by_name(
    tmp_path: Path, tamper: Callable[[Path], object], named: str
) -> None:
    folder = write(tmp_path)
    tamper(folder)
    with pytest.raises(
        ProblemError, match=r"differ from what suite\.toml lists.*copy the folder"
    ) as error:
        read_suite(folder)
    assert named in str(error.value)


def test_a_link_out_of_the_suite_is_no_file_of_it(tmp_path: Path) -> None:
    folder = write(tmp_path)
    text = (folder / CODE).read_text()
    (folder / CODE).unlink()
    (tmp_path / "elsewhere.py").write_text(text)
    (folder / CODE).symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(ProblemError, match=CODE):
        read_suite(folder)


def test_sums_that_were_made_again_for_other_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    card, files = read_suite(folder)
    write_files(folder, card, files | {CODE: b"pass\n"})
    with pytest.raises(ProblemError, match=r"SHA256SUMS differ from what suite\.toml lists"):
        read_suite(folder)


def test_rules_can_be_edited_and_give_the_suite_another_title(tmp_path: Path) -> None:
    folder = write(tmp_path)
    before = read_card(folder)
    text = (folder / SUITE_FILE).read_text()
    (folder / SUITE_FILE).write_text(f'{text}\n[slices.odd]\nkinds = ["muta*"]\n')
    card, _ = read_suite(folder)
    assert card.slices["odd"] == SliceRule(kinds=("muta*",))
    assert card.title != before.title
    (folder / SUITE_FILE).write_text(f'{text}\n[slices.odd]\nkinds = ["no"]\n')
    with pytest.raises(ProblemError, match=r"none in slices \['odd'\]"):
        read_suite(folder)
    (folder / SUITE_FILE).write_text(text.replace("problems = 4", "problems = 5"))
    with pytest.raises(ProblemError, match=r"has 4 problems with 4 ids.*wanted 5"):
        read_suite(folder)
    (folder / SUITE_FILE).write_text(text.replace("version = 3", "version = 0"))
    with pytest.raises(ProblemError, match=r"(?s)is no card of a suite: .*version"):
        read_suite(folder)
