"""Each mark of a test is run by some script of `.ci/` or by the Makefile, or says why none can."""

import re
import tomllib

from tests.architecture.source import ROOT, list_files

# `python -m tests.benchmarks.gpu_day` runs them where there is one
NEED_A_DEVICE = {"gpu"}
SELECTION = re.compile(r"""-m ['"]?([^'"\n]*)""")
SELECTED = re.compile(r"(?<!not )\b[a-z]+\b")


def test_every_mark_is_run_by_a_script() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {
        line.partition(":")[0] for line in settings["markers"] if "(" not in line.partition(":")[0]
    }
    scripts = [name for name in list_files() if re.fullmatch(r"\.ci/\w+|Makefile", name)]
    expressions = [
        expression
        for name in scripts
        for expression in SELECTION.findall((ROOT / name).read_text())
    ]
    chosen = {word for expression in expressions for word in SELECTED.findall(expression)}
    for expression in expressions:
        if expression.startswith("not "):  # the queue of .ci/run: all marks but those it names
            chosen |= marks - set(re.findall(r"\bnot ([a-z]+)", expression))
    assert marks - chosen == NEED_A_DEVICE


def test_the_queue_of_the_gate_is_the_default_one_with_slow_and_browser_tests() -> None:
    """Else a mark whose packages an environment of its own installs would run without them."""
    default = (ROOT / "pyproject.toml").read_text()
    left_out, of_gate = (
        {*re.findall(r"\bnot ([a-z0-9_]+)", expression)}
        for text in (default, (ROOT / ".ci/run").read_text())
        for expression in SELECTION.findall(text)
        if expression.startswith("not ")
    )
    assert left_out - of_gate == {"slow", "browser"}
    assert of_gate <= left_out


def test_every_script_is_called() -> None:
    names = [name for name in list_files() if re.fullmatch(r"\.ci/\w+|\.github/.*\.yml", name)]
    texts = {name: (ROOT / name).read_text() for name in names}
    for script in set(names) - {".ci/nightly"}:  # people start it
        callers = [name for name, text in texts.items() if name != script and script in text]
        assert callers or script.startswith(".github/"), script
