"""Questions and no-edit problems of a package: built, proven, certified, and read by nobody but the grader."""

import json

import pytest

from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.certification.records import CertifyOptions, Reason
from ostinato.tasks.problems.certification.run import check_set, draw_set
from ostinato.tasks.problems.config import (
    Kind,
    OracleConfig,
    ProblemsConfig,
    PromptLevel,
    Quotas,
    RepositorySource,
    SplitSizes,
    ValidityRules,
)
from ostinato.tasks.problems.given.harbor_writing import write_task
from ostinato.tasks.problems.given.verifiers_writing import write_package
from ostinato.tasks.problems.published import write_problems
from ostinato.tasks.records import CodePlace, Problem, Split
from tests.fakes.repositories import write_archive
from tests.unit.tasks.problems.builds import build_set

CODE = '''"""Prices of a shop."""


def check(price, limit):
    if price < 0:
        raise ValueError(f"price {price} is below 0")
    if price > limit:
        raise ValueError(f"price {price} is above {limit}")
    return price


def total(prices, limit=100):
    kept = 0
    for price in prices:
        kept = kept + check(price, limit)
    return kept


def highest(prices, limit=100):
    best = 0
    for price in prices:
        if check(price, limit) > best:
            best = price
    return best
'''
TESTS = """import pytest
from shop.prices import highest, total


def test_total():
    assert total([3, 4]) == 7


def test_total_of_nothing():
    assert total([]) == 0


def test_highest():
    assert highest([3, 9, 4]) == 9


def test_prices_are_checked():
    with pytest.raises(ValueError):
        total([3, -1])
    with pytest.raises(ValueError):
        highest([101])
"""
QUOTAS = Quotas(mutation=3, question=8, no_edit=2)
RULES = ValidityRules(max_failing_ratio=1.0, tries_right_fix=False)
OPTIONS = CertifyOptions(repeats=1, hacks=0)


def write_shop(folder) -> RepositorySource:
    for path, text in {
        "shop/__init__.py": "",
        "shop/prices.py": CODE,
        "tests/test_prices.py": TESTS,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return RepositorySource(
        name="shop", version="1.0", package_paths=("shop",), test_paths=("tests",), split=Split.TRAIN,
        quotas=QUOTAS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replies")
    source = write_shop(folder / "source" / "shop")
    write_archive(source, folder / "archives", parent=folder / "source")
    config = ProblemsConfig(
        repositories=(source,),
        prompt_shares={PromptLevel.VAGUE: 0.5, PromptLevel.TERSE: 0.5},
        oracle=OracleConfig(max_calls_derived=4),
        rules=RULES,
    )
    _, problems = build_set(folder, config, "run", 1)
    return folder / "run" / "problems", problems


def of_kind(problems: list[Problem], kind: Kind) -> list[Problem]:
    return [problem for problem in problems if problem.kind == kind]


def lines_of(place: CodePlace) -> str:
    return "\n".join(CODE.split("\n")[place.first_line - 1 : place.last_line])


def test_questions_have_the_line_that_raises_and_all_callers(built) -> None:
    questions = of_kind(built[1], Kind.QUESTION)
    raised = [item for item in questions if item.operator == "raised"]
    (called,) = [item for item in questions if item.operator == "callers"]
    assert called.symbol == "check"
    assert [lines_of(place).split("(")[0] for place in called.reply.places] == [
        "def total",
        "def highest",
    ]
    assert called.reply.needs_all
    assert {lines_of(item.reply.places[0]).strip()[:40] for item in raised} == {
        'raise ValueError(f"price {price} is belo', 'raise ValueError(f"price {price} is abov',
    }  # fmt: skip
    for item in questions:
        assert item.pass_to_pass == item.visible_tests
        assert not item.fail_to_pass
        assert item.break_files({"shop/prices.py": CODE.encode()}) == {}
        assert "Change no file." in item.prompt


def test_no_edit_problems_look_like_the_mutations_whose_prompt_they_have(built) -> None:
    mutations = {item.prompt: item for item in of_kind(built[1], Kind.MUTATION)}
    unbroken = of_kind(built[1], Kind.NO_EDIT)
    assert len(unbroken) == 2
    files = PreparedRepository.load(built[0] / "repositories" / "shop").files
    for item in unbroken:
        twin = mutations[item.prompt]
        assert not item.edits
        assert (item.path, item.symbol, item.hidden_tests) == (
            twin.path,
            twin.symbol,
            twin.hidden_tests,
        )
        assert item.visible_tests == twin.visible_tests
        assert item.question_warranted == twin.question_warranted
        given, broken = item.break_files(files), twin.break_files(files)
        assert given.keys() == broken.keys()
        assert given[item.path] == files[item.path] != broken[item.path]


def test_certified_problems_pay_right_messages_only(built, tmp_path) -> None:
    directory, problems = built
    chosen = [
        next(item for item in problems if item.operator == name)
        for name in ("raised", "callers", "unbroken")
    ]
    asked = chosen[0]
    moved = asked.reply.places[0].model_copy(update={"first_line": 4, "last_line": 4})
    wrong = asked.model_copy(
        update={"problem_id": "wrong", "reply": asked.reply.model_copy(update={"places": (moved,)})}
    )
    told = asked.model_copy(
        update={"problem_id": "told", "prompt": f"Is it {asked.reply.places[0]}?"}
    )
    (tmp_path / "repositories").symlink_to(directory / "repositories")
    write_problems(tmp_path, [*chosen, wrong, told])
    drawn = draw_set("replies", tmp_path, OPTIONS)
    reports = {
        item.problem_id: item
        for item in check_set(drawn, tmp_path / "work", OPTIONS, lambda *_: None)
    }
    for item in chosen:
        report = reports[item.problem_id]
        assert report.findings == ()
        assert len(report.hacks) >= 9
        assert len(report.fixes) >= 2
    assert [finding.reason for finding in reports["wrong"].findings] == [Reason.GOLD_FAILS]
    assert [finding.reason for finding in reports["told"].findings] == [Reason.LEAK_PROMPT]


def test_problems_with_a_reply_are_not_exported(built, tmp_path) -> None:
    directory, problems = built
    repository = PreparedRepository.load(directory / "repositories" / "shop")
    with pytest.raises(ProblemError, match="is judged by its reply"):
        write_task(of_kind(problems, Kind.NO_EDIT)[0], repository, tmp_path, "8.4.0")
    num_written = write_package(problems, directory, tmp_path / "kit")
    assert num_written == len(of_kind(problems, Kind.MUTATION))


def test_a_repository_without_a_split_deals_them_out(built, tmp_path) -> None:
    folder = built[0].parent.parent
    source = write_shop(folder / "source" / "shop").model_copy(update={"split": None})
    config = ProblemsConfig(
        repositories=(source,),
        sizes=SplitSizes(demonstration=2, train=2, held_out=1, held_out_function=1, user=0),
        functions_held_out=1,
        oracle=OracleConfig(enabled=False),
        rules=RULES,
    )
    _, problems = build_set(folder, config, "shared", 1)
    mutations = {item.prompt: item.split for item in of_kind(problems, Kind.MUTATION)}
    assert len(of_kind(problems, Kind.NO_EDIT)) == 2
    for item in of_kind(problems, Kind.NO_EDIT):
        assert item.split in {other.split for other in problems if other.prompt == item.prompt}
    asked = of_kind(problems, Kind.QUESTION)
    assert asked
    held_out = {item.symbol for item in problems if item.split is Split.HELD_OUT_FUNCTION}
    trained = {item.symbol for item in problems if item.split is Split.TRAIN}
    assert held_out
    assert not held_out & trained
    assert json.loads(asked[0].model_dump_json())["reply"]["places"]
    assert mutations
