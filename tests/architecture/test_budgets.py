"""Files, classes and functions stay small. The measured distribution is printed with `-s`."""

import statistics
from collections import Counter

from tests.architecture.source import (
    count_lines,
    list_classes,
    list_files,
    list_functions,
    list_modules,
)

FILE_LINES_MAXIMUM = 500
# the step of RL from samples to report reads on one page
STEP = "tasks/reinforcement/learning/step.py"
STEP_LINES_MAXIMUM = 300
FOLDER_FILES_MAXIMUM = 25
STAGE_FOLDERS_MAXIMUM = 12
FILE_LINES_MEDIAN = 150
FILE_LINES_P90 = 350
CLASS_LINES_MAXIMUM = 250
FUNCTION_LINES_MAXIMUM = 80
FUNCTION_LINES_P90 = 40
FUNCTION_SHARE_OVER_60 = 0.01
# path::function -> why it may be longer
LONG_FUNCTIONS: dict[str, str] = {}
# folder -> why it may hold more files
FULL_FOLDERS = {"flows": "one file per flow"}


def _percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def test_files_keep_their_budget() -> None:
    lengths = {name: count_lines(name) for name in list_modules()}
    real = [length for length in lengths.values() if length > 0]
    median, p90 = statistics.median(real), _percentile(real, 0.9)
    print(f"files: {len(real)}, median {median:.0f}, p90 {p90}, longest {max(real)}")  # noqa: T201

    assert {name: n for name, n in lengths.items() if n > FILE_LINES_MAXIMUM} == {}
    assert lengths[STEP] <= STEP_LINES_MAXIMUM
    assert median <= FILE_LINES_MEDIAN
    assert p90 <= FILE_LINES_P90


def test_classes_keep_their_budget() -> None:
    too_long = [found for found in list_classes() if found.lines > CLASS_LINES_MAXIMUM]

    assert too_long == []


def test_functions_keep_their_budget() -> None:
    functions = [
        function
        for function in list_functions()
        if f"{function.path}::{function.name}" not in LONG_FUNCTIONS
    ]
    lengths = [function.lines for function in functions]
    p90 = _percentile(lengths, 0.9)
    over_60 = sum(length > 60 for length in lengths) / len(lengths)
    print(f"functions: {len(lengths)}, p90 {p90}, longest {max(lengths)}, over 60 {over_60:.3%}")  # noqa: T201

    too_long = [function for function in functions if function.lines > FUNCTION_LINES_MAXIMUM]
    assert too_long == []
    assert p90 <= FUNCTION_LINES_P90
    assert over_60 <= FUNCTION_SHARE_OVER_60


def test_folders_keep_their_budget() -> None:
    folders = Counter(
        name.rpartition("/")[0] for name in list_modules() if not name.endswith("__init__.py")
    )

    full = {name: n for name, n in folders.items() if n > FOLDER_FILES_MAXIMUM}
    assert full.keys() <= FULL_FOLDERS.keys(), full


def test_tasks_hold_a_folder_for_each_stage_and_the_records_that_stages_exchange() -> None:
    inside = {name.split("/")[1] for name in list_files() if name.startswith("tasks/")}
    loose = {name for name in inside if "." in name}

    assert loose == {"__init__.py", "records.py"}
    assert len(inside - loose) <= STAGE_FOLDERS_MAXIMUM
