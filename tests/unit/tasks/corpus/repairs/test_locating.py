"""Locating: what the demonstrator asks, when it believes to have found it, and whole demonstrations."""

import random
import re
from pathlib import Path

import pytest

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.agent.dialects.compact.places import find_place
from ostinato.infra.agent.transcript import CallStatus
from ostinato.tasks.corpus.config import (
    CodeSource,
    CorpusConfig,
    CorpusRequest,
    DemonstrationConfig,
    TokenBudgets,
)
from ostinato.tasks.corpus.located import DescribedFile, draw_pools, grep_files
from ostinato.tasks.corpus.repairs.locating import Locating, choose_words, drive, locate
from ostinato.tasks.problems.descriptions import write_prompt
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import Problem
from tests.unit.tasks.corpus.test_corpus_stage import build, read_demonstrations

DESCRIBED = {
    "add_all": "Add up numbers from a start",
    "keep_even": "Keeps the numbers that are even",
    "largest_gap": "Widest distance between neighbours",
}
GENERAL = '''def open_box_{number}(path):
    """Open whatever box {number} stands at a path."""
    with open(path) as file:
        text = file.read()
    return text


def close_box_{number}(path, quietly=False):
    """Closes what number {number} has left open."""
    lines = [line for line in path if line]
    return lines if quietly else sorted(lines)
'''


@pytest.fixture
def described_directory(problems_directory: Path) -> Path:
    """The same problems, told by what their functions are for."""
    file = problems_directory / PROBLEMS_FILE
    problems = [Problem.model_validate_json(line) for line in file.read_text().splitlines()]
    lines = [
        problem.model_copy(
            update={"prompt": write_prompt("tiny", DESCRIBED[problem.symbol])}
        ).model_dump_json()
        for problem in problems
    ]
    file.write_text("\n".join(lines) + "\n")
    return problems_directory


def test_one_search_finds_a_function_or_ends_the_talk() -> None:
    hits = {True: "kit/a.py:3-9 def join(x):\nkit/b.py:1-2 def other():", False: "nothing found"}
    for is_found, result in hits.items():
        asked = []

        def answer(call: str, result: str = result, asked: list[str] = asked) -> str:
            asked.append(call)
            return result

        located = drive(locate("search", "Joins lists", "kit/a.py", "join"), answer)
        assert asked == ["<codebase_search> Joins lists</codebase_search>"]
        assert (located is not None) is is_found


def test_greps_go_on_word_by_word_until_the_definition_is_shown() -> None:
    files = {"kit/a.py": "def combine(x):\n    pass\n\n\ndef combine_lists(x):\n    pass\n"}

    def answer(call: str) -> str:
        return grep_files(files, call.removeprefix("<grep>").removesuffix("</grep>"))

    talk = locate("grep", "Glues two lists with each", "kit/a.py", "combine_lists")
    located = drive(talk, answer)
    assert located is not None
    assert [call for call, _ in located.steps] == [
        "<grep>(?xi)^def\\s.* Glues</grep>",
        "<grep>(?xi)^def\\s.* two</grep>",
        "<grep>(?xi)^def\\s.* lists</grep>",
    ]
    assert located.steps[-1][1] == "kit/a.py:5:def combine_lists(x):"
    assert located.place == "kit/a.py::combine_lists"
    assert drive(locate("grep", "Glues two", "kit/a.py", "combine_lists"), answer) is None


def test_a_function_is_shown_by_its_definition_in_its_file_only() -> None:
    shown = "kit/a.py::join"
    assert find_place("x\nkit/a.py:12:def join(a):", "kit/a.py", "join") == shown
    assert find_place("kit/a.py:12-14 def join(a):", "kit/a.py", "join") == shown
    for result in (
        "kit/a.py:12:def join_all(a):",
        "other/kit/a.py:12:def join(a):",
        "kit/a.py:12:    return join(a)",
        "kit/b.py:12-14 def join(a):",
    ):
        assert find_place(result, "kit/a.py", "join") is None


def test_a_line_with_a_tag_is_read_by_its_tag() -> None:
    result = "<L1>kit/b.py:1-2 def join(a):\n<L2>kit/a.py:12-14 def join(a):\n<L3>kit/a.py:1:x"
    assert find_place(result, "kit/a.py", "join") == "<L2>"


def test_pools_hold_every_file_once_and_other_neighbours_each_time() -> None:
    files = [
        DescribedFile(source, f"{number}.py", "", {})
        for source in ("a", "b")
        for number in range(90)
    ]
    rng = random.Random(0)
    first, second = draw_pools(files, 0, rng), draw_pools(files, 1, rng)
    for pools in (first, second):
        drawn = sorted((item.source, item.path) for pool in pools for item in pool.files)
        assert drawn == sorted((item.source, item.path) for item in files)
        assert all(len({item.source for item in pool.files}) == 1 for pool in pools)
    together = [
        {frozenset(item.path for item in pool.files) for pool in pools} for pools in (first, second)
    ]
    assert not together[0] & together[1]
    assert not {pool.name for pool in first} & {pool.name for pool in second}


def test_dull_words_are_not_grepped_and_none_twice() -> None:
    assert choose_words("Returns the First item, first of all") == ["First", "item"]


@pytest.mark.parametrize("way", ["search", "grep"])
def test_demonstrations_locate_with_the_tools_of_their_arm(
    way: Locating, described_directory: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for number in range(12):
        (code / f"module_{number}.py").write_text(GENERAL.replace("{number}", str(number)))
    tool, other = ("codebase_search", "grep") if way == "search" else ("grep", "codebase_search")
    request = CorpusRequest(
        config=CorpusConfig(
            sources=(CodeSource(kind="directory", name="code", path=str(code), licence="MIT"),),
            vocab_size=500,
            budgets=TokenBudgets(
                code=2000, library=2000, repair=2000, repair_general=0, located=4000
            ),
            held_out_share=0.2,
            near_duplicate_ratio=1.0,
            demonstrations=DemonstrationConfig(
                count=6, wrong_first_share=0, give_up_share=0, locating=way
            ),
        ),
        problems_directory=str(described_directory),
        harness=HarnessConfig(
            tools=("read_file", "edit_file", "run_terminal", tool),
            context_tokens=2000,
            place_tags=True,
        ),
    )
    result, renderer = build(request, tmp_path / "out")
    documents = read_demonstrations(tmp_path / "out", renderer)
    assert 0 < result.demonstrations < len(documents)
    for index, (text, trained) in enumerate(documents):
        assert f"<{other}>" not in text
        called, read = text.index(f"<{tool}>"), text.index("<read_file>")
        assert text.startswith("<|user|>This fails in ")
        assert called < read
        pointed = re.search(r"<read_file>(<L\d+>)</read_file>", text)
        assert pointed is not None
        shown = re.search(rf"{pointed[1]}\S+ ?def (\w+)\(", text[called:read])
        assert shown is not None
        assert shown[1] not in text[:called]  # neither prompt nor an earlier turn names it
        assert f"def {shown[1]}(" not in trained  # results are read, not written
        assert f"<read_file>{pointed[1]}</read_file>" in trained
        assert CallStatus.UNKNOWN_TOOL.value not in text
        assert ("<edit_file>" in text) is (index < result.demonstrations)
