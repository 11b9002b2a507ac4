"""An environment of verifiers with tools: find how many of a thing are on a shelf."""

import verifiers as vf
from datasets import Dataset

SHELF = {"plums": 3, "figs": 12}


async def count(thing: str, places: list[str] | None = None) -> str:
    """Counts a thing.

    Args:
        thing: what to count
        places: where to look
    """
    if thing not in SHELF:
        raise KeyError(f"no {thing} here")
    return str(SHELF[thing])


def is_right(completion, answer, **kwargs) -> float:
    return float(answer in completion[-1]["content"])


def load_environment(**kwargs):
    rows = [{"question": f"How many {name}?", "answer": str(SHELF[name])} for name in SHELF]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[count], rubric=vf.Rubric(funcs=[is_right])
    )
