"""Rewrites keep what a function does and are other texts; hacks are dealt out evenly; partial repairs are partial."""

import random
from collections import Counter
from pathlib import Path

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.certification.checks import repair_all_but_one
from ostinato.tasks.problems.certification.records import CertifyOptions
from ostinato.tasks.problems.certification.right_fixes import rewrite_original
from ostinato.tasks.problems.certification.run import assign_hacks
from ostinato.tasks.problems.config import Kind
from ostinato.tasks.records import LineEdit, Problem, Split

PATH = "code.py"
ORIGINAL = b'''import collections

LIMIT = 3  # a comment


def count(words, least=1, other=LIMIT):
    """Words by length."""
    seen = {}
    total = 0
    while words and total < 16:
        word, *words = words
        if word is not None and len(word) >= least:
            key = len(word) if word not in seen else 'again'
            seen[key] = seen.get(key, 0) + 1
            total += 1
        elif word is None:
            continue
        else:
            try:
                total += [len(part) for part in [word]][0]
            except TypeError as error:
                raise ValueError('no word') from error
    if not seen:
        return None
    else:
        return collections.OrderedDict(sorted(seen.items(), key=lambda pair: str(pair[0]))), total


def untouched(seen):
    return seen
'''
BROKEN = ORIGINAL.replace(b"seen.get(key, 0) + 1", b"seen.get(key, 0) + 2")
CALLS = ((["a", "bee", "bee", None, "c"],), (["", "ab"], 2), ([None],), (["a"] * 20,), ([3],))


def _results(text: bytes) -> list[str]:
    space: dict = {}
    exec(compile(text, PATH, "exec"), space)
    results = []
    for call in CALLS:
        try:
            results.append(repr(space["count"](*call)))
        except Exception as error:  # noqa: BLE001 - what it raises is compared
            results.append(repr(error))
    return results


def test_rewrites_do_what_the_original_does_and_are_told_apart() -> None:
    fixes = rewrite_original({PATH: ORIGINAL}, {PATH: BROKEN}, 20, random.Random(0))
    assert len(fixes) == 10
    assert len({files[PATH] for files in fixes.values()}) == len(fixes)
    assert ORIGINAL not in {files[PATH] for files in fixes.values()}
    wanted = _results(ORIGINAL)
    assert wanted != _results(BROKEN)
    assert {name: _results(files[PATH]) for name, files in fixes.items()} == dict.fromkeys(
        fixes, wanted
    )
    assert all(b"def untouched(seen):\n    return seen" in files[PATH] for files in fixes.values())


def test_a_few_begin_with_comment_and_layout() -> None:
    fixes = rewrite_original({PATH: ORIGINAL}, {PATH: BROKEN}, 3, random.Random(0))
    assert list(fixes)[:2] == ["a comment", "another layout"]
    assert len(fixes) == 3


def test_every_hack_meets_as_many_problems_as_any_other() -> None:
    problems = [Problem.model_construct(problem_id=str(number)) for number in range(40)]
    dealt = assign_hacks(problems, CertifyOptions(hacks=8))
    assert {len({hack.name for hack in hacks}) for hacks in dealt.values()} == {8}
    met = Counter(hack.name for hacks in dealt.values() for hack in hacks)
    assert max(met.values()) - min(met.values()) <= 1


def test_partial_repairs_leave_one_place_each(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "kit" / "a.py").write_text("A = 1\nB = 1\n")
    repository = PreparedRepository.from_directory("kit", tmp_path, ("kit",), ("tests",))
    edits = tuple(
        LineEdit(path="kit/a.py", line_number=n, gold_text=f"{name} = 1", broken_text=f"{name} = 2")
        for n, name in enumerate("AB", 1)
    )
    problem = Problem(
        problem_id="p",
        repository="kit",
        repository_fingerprint=repository.fingerprint,
        kind=Kind.MULTI_PLACE,
        prompt="",
        split=Split.TRAIN,
        edits=edits,
    )
    repairs = repair_all_but_one(problem, repository)
    assert [files["kit/a.py"] for files in repairs.values()] == [
        b"A = 2\nB = 1\n",
        b"A = 1\nB = 2\n",
    ]
    combined = problem.model_copy(update={"kind": Kind.COMBINED})
    assert repair_all_but_one(combined, repository) == {}
