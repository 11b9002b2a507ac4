"""Commit mining on a small history: only a change of code with a new test becomes a problem, and it
is proven like any other.
"""

import asyncio
import os

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.test_server import TestServer
from ostinato.tasks.problems.building import BuiltPart, Part
from ostinato.tasks.problems.commits import clean_message, mine_commits
from ostinato.tasks.problems.config import (
    GitSource,
    ProblemsConfig,
    PromptLevel,
    ValidityRules,
    pin_commits,
)
from ostinato.tasks.problems.prompts import write_prompt
from ostinato.tasks.problems.proving.baseline import measure_baseline
from ostinato.tasks.problems.proving.judging import (
    ProofOutcome,
    ProofResult,
    RepositoryUnderTest,
    StubTrials,
    judge_candidate,
)
from ostinato.tasks.problems.publishing import make_problem
from ostinato.tasks.problems.selection import Sources
from ostinato.tasks.records import Split
from tests.fakes.repositories import cover_everything
from tests.unit.tasks.problems.builds import begin_history

BROKEN = 'def half(number):\n    """Half of a number."""\n    return number // 2\n'
WHOLE = BROKEN.replace("//", "/")
DOUBLE = "\n\ndef double(number):\n    return number * 2\n"
TEST = "from kit.core import half\n\n\ndef test_half_even():\n    assert half(4) == 2\n"
NEW_TEST = TEST + "\n\ndef test_half_odd():\n    assert half(3) == 1.5\n"
STEPS = [
    ("First version of the kit", {"kit/core.py": BROKEN + DOUBLE, "tests/test_core.py": TEST}),
    ("docs: say what the kit does", {"README.md": "kit"}),
    ("Fix rounding of odd numbers (#12)\n\nfixes #11, see https://example.org/x",
     {"kit/core.py": WHOLE + DOUBLE, "tests/test_core.py": NEW_TEST}),
    ("Fix the name of a variable in core", {"kit/core.py": WHOLE + DOUBLE + "\nKIT = 1\n"}),
    ("Add a module for later use", {"kit/later.py": "x = 1\n", "tests/test_later.py": TEST}),
    ("tidy", {"kit/core.py": WHOLE + DOUBLE}),
]  # fmt: skip


def source_in(folder, name="kit", **others):
    """The history that lies there."""
    return GitSource(
        name=name, path=str(folder), package_paths=("kit",), test_paths=("tests",), **others
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "history"
    _, commit = begin_history(folder)
    for message, files in STEPS:
        commit(message, {"kit/__init__.py": ""} | files)
    return source_in(folder, revision="main")


def test_only_a_fix_with_a_new_test_is_mined(history, tmp_path):
    mining = mine_commits(history, tmp_path / "made", {})
    assert dict(mining.refused) == {
        "first_commit": 1,
        "not_a_change": 1,
        "no_new_test": 1,
        "adds_or_removes_files": 1,
        "short_message": 1,
    }
    (mined,) = mining.found
    assert mined.candidate.symbol == "half"
    assert mined.candidate.message == "Fix rounding of odd numbers"
    files = mined.repository.files
    assert files["kit/core.py"].decode() == WHOLE + DOUBLE
    assert mined.candidate.broken_files(files)["kit/core.py"].decode() == BROKEN + DOUBLE
    assert "README.md" not in files
    assert not any(".git" in path for path in files)


def test_mined_commit_is_proven_by_its_new_test(history, tmp_path):
    (mined,) = mine_commits(history, tmp_path / "made", {}).found

    async def judge():
        servers = [TestServer(mined.repository, hash_seed=seed) for seed in (0, 1)]
        try:
            rules = ValidityRules(max_failing_ratio=0.6)
            baseline = await measure_baseline(*servers, rules, 0)
            trials = StubTrials(servers[0], rules.time_limit_seconds)
            return await judge_candidate(
                mined.candidate, RepositoryUnderTest(baseline, *servers, rules, trials)
            )
        finally:
            for server in servers:
                await server.close()

    judgement = asyncio.run(judge())
    assert judgement.finding is ProofOutcome.PROVEN
    assert judgement.fail_to_pass == ("tests/test_core.py::test_half_odd",)
    assert judgement.pass_to_pass == ("tests/test_core.py::test_half_even",)


@pytest.mark.parametrize("others", [{}, {PromptLevel.PLACE: 1.0}])
def test_mined_commit_has_another_wording_than_a_description(history, tmp_path, others):
    (mined,) = mine_commits(history, tmp_path / "made", {}).found
    candidate = mined.candidate
    built = BuiltPart(
        Part(mined.repository, Split.TRAIN, mined=(candidate,)),
        cover_everything(Sources.read(mined.repository)),
        splits={candidate.candidate_id: Split.TRAIN},
    )
    judgement = ProofResult(
        candidate_id=candidate.candidate_id,
        finding=ProofOutcome.PROVEN,
        fail_to_pass=("tests/test_core.py::test_half_odd",),
    )
    config = ProblemsConfig(prompt_shares={PromptLevel.DESCRIBED: 9.0, **others})
    prompt = make_problem(candidate, judgement, built, config).prompt
    assert prompt == "Fix half in kit/core.py" if others else prompt.startswith("Fix rounding")


def test_a_branch_that_moved_is_another_configuration(tmp_path):
    _, commit = begin_history(tmp_path / "kit")
    config = ProblemsConfig(git=(source_in(tmp_path / "kit"), source_in(tmp_path / "gone", "gone")))
    commit("First", {"a.py": "a = 1\n"})
    first = pin_commits(config)
    assert pin_commits(config) == pin_commits(first) == first
    assert first.git[1].revision == "HEAD"  # what cannot be read is left out by the build
    commit("Second", {"a.py": "a = 2\n"})
    assert pin_commits(config) != first
    assert pin_commits(first) == first


def test_missing_repository_is_a_clear_error(tmp_path):
    source = GitSource(name="gone", path=str(tmp_path), package_paths=("a",), test_paths=("b",))
    with pytest.raises(ProblemError, match=r"git log in .* ended with 128"):
        mine_commits(source, tmp_path / "made", {})


def test_odd_commits_end_no_mining(tmp_path):
    """Latin-1 source, a link that changes, separators in a message, a name that is no text."""
    folder = tmp_path / "history"
    _, commit = begin_history(folder)
    commit("First version of the kit", {"kit/__init__.py": "", **STEPS[0][1]})
    (folder / "kit/old.py").write_bytes("# caf\xe9\nOLD = 1\n".encode("latin-1"))
    (folder / "kit/link.py").symlink_to("nothing.py")
    (folder / os.fsdecode(b"kit/na\xefve.py")).write_text("x = 1\n")
    commit("Add what is odd to the kit", {})
    (folder / "kit/old.py").write_bytes("# caf\xe9\nOLD = 2\n".encode("latin-1"))
    commit("Fix what is old in the kit", {"tests/test_old.py": TEST})
    (folder / "kit/link.py").unlink()
    (folder / "kit/link.py").symlink_to("elsewhere.py")
    commit("Fix the link of the kit", {"tests/test_link.py": TEST})
    fixed = {"kit/core.py": WHOLE + DOUBLE, "tests/test_core.py": NEW_TEST}
    commit("Fix rounding of odd\x1f numbers\x1e in the kit", fixed)
    source = source_in(folder, revision="main")
    mining = mine_commits(source, tmp_path / "made", {})
    assert [one.candidate.symbol for one in mining.found] == ["half"]
    assert dict(mining.refused) == {
        "first_commit": 1, "adds_or_removes_files": 1, "no_plain_text": 2,
    }  # fmt: skip


def test_messages_lose_what_leads_to_the_fix():
    message = "fix: Crash on empty input (#31)\n\nSee 1a2b3c4d5e\nCo-authored-by: B <b@c.d>"
    text = clean_message(message)
    assert text.startswith("Crash on empty input")
    assert not {"#31", "1a2b3c4d5e", "b@c.d"} & set(text.split())


def test_merged_pull_request_of_a_src_layout_is_mined(tmp_path):
    git, commit = begin_history(tmp_path / "history")
    first = {"src/kit/__init__.py": "", "src/kit/core.py": BROKEN, "tests/test_core.py": TEST}
    commit("First version of the kit", first)
    git("checkout", "-q", "-b", "odd")
    commit("wip", {"src/kit/core.py": WHOLE, "tests/test_core.py": NEW_TEST})
    git("checkout", "-q", "main")
    text = "Merge pull request #3 from a/odd\n\nFix rounding of odd numbers"
    git("merge", "-q", "--no-ff", "-m", text, "odd")
    source = source_in(tmp_path / "history", stripped_prefix="src", revision="main")
    (mined,) = mine_commits(source, tmp_path / "made", {}).found
    assert mined.candidate.message == "Fix rounding of odd numbers"
    assert mined.candidate.broken_files(mined.repository.files) == {"kit/core.py": BROKEN.encode()}
    assert set(mined.repository.files) == {"kit/__init__.py", "kit/core.py", "tests/test_core.py"}
    judgement = ProofResult(candidate_id=mined.candidate.candidate_id, finding=ProofOutcome.PROVEN)
    prompt = write_prompt(PromptLevel.DETAILED, mined.candidate, judgement, None, "", 0)
    assert prompt.startswith("Fix rounding of odd numbers\n\nThe change belongs in kit, ")


def test_a_fix_from_before_the_project_moved_its_files_is_mined(tmp_path):
    git, commit = begin_history(tmp_path / "history")
    test, new_test = (text.replace("kit.core", "kit") for text in (TEST, NEW_TEST))
    commit("First version of the kit", {"kit.py": BROKEN, "test_kit.py": test})
    commit("Fix rounding of odd numbers", {"kit.py": WHOLE, "test_kit.py": new_test})
    git("rm", "-q", "-r", "kit.py", "test_kit.py")
    commit("Move to src", {"src/kit/__init__.py": WHOLE, "tests/test_kit.py": new_test})
    source = source_in(tmp_path / "history", name="kit-commits", stripped_prefix="src")
    (mined,) = mine_commits(source, tmp_path / "made", {}).found
    assert set(mined.repository.files) == {"kit.py", "test_kit.py"}
    assert mined.candidate.broken_files(mined.repository.files) == {"kit.py": BROKEN.encode()}
    assert mined.candidate.test_files == ("test_kit.py",)
