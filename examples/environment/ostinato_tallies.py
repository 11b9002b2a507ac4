"""An environment: the agent adds up a column of a table and writes the total to a file.

The table is a file of the problem, and the total is a fact that only the judge knows. Each problem also gets the
README of the environment. The judge does not run files that the agent leaves.
"""

import random
from collections.abc import Mapping

from ostinato.tasks.grading.environments import Judgement, OpenBox, ProblemDraft
from ostinato.tasks.records import Problem

FRUITS = ("apples", "pears", "plums", "figs")
TABLE = "sales.csv"
ANSWER = "answer.txt"


class Tallies:
    """Tables of sold fruit with one total to find."""

    files: Mapping[str, bytes] = {
        "README.md": b"Each line of sales.csv is a fruit, a comma and a number sold.\n"
    }

    def draw(self, rng: random.Random) -> ProblemDraft:
        """A table of four to nine lines and a fruit to add up."""
        rows = [(rng.choice(FRUITS), rng.randint(1, 40)) for _ in range(rng.randint(4, 9))]
        fruit = rng.choice(rows)[0]
        return ProblemDraft(
            prompt=f"Write how many {fruit} were sold in all to {ANSWER}, nothing else.",
            files={TABLE: "".join(f"{name},{count}\n" for name, count in rows)},
            facts={"total": str(sum(count for name, count in rows if name == fruit))},
        )

    async def judge(
        self, problem: Problem, files: Mapping[str, bytes], open_box: OpenBox
    ) -> Judgement:
        """Passed if the answer is the total and the table is unchanged."""
        if files.get(TABLE) != problem.given_files[TABLE].encode():
            return Judgement(passed=False, detail=f"{TABLE} was changed")
        answer = files.get(ANSWER, b"").decode(errors="replace").strip()
        if answer == problem.facts["total"]:
            return Judgement(passed=True)
        return Judgement(passed=False, detail=f"{ANSWER} holds {answer[:40]!r}")

    def solve(self, problem: Problem) -> Mapping[str, bytes]:
        """The correct answer. `ostinato certify` uses it to prove that a problem can be solved."""
        return {ANSWER: problem.facts["total"].encode()}


ENVIRONMENT = Tallies()
