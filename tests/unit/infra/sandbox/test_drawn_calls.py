"""Drawn calls show what callers of a function and of its module rely on: refusals, parameters, coroutines, properties,
plain data. Other ways to write the same show nothing.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = """import asyncio

LIMIT = 5
TABLE = {"a": len}


def f(text, *, scale=1):
    if scale < 0:
        raise ValueError("negative scale")
    return [scale * len(word) for word in text.split()]


async def fetched(number, times=1):
    await asyncio.sleep(0)
    return [number] * times


class Kind:
    color = "red"

    def __init__(self, text: str = "abc"):
        self.text = text

    @property
    def length(self):
        return len(self.text)

    def __getitem__(self, place: int):
        return self.text[place]

    @staticmethod
    def joined(first: str, second: str):
        return first + second
"""
FETCHED = SOURCE[SOURCE.index("async def") : SOURCE.index("class Kind")]
VALIDATION = SOURCE[SOURCE.index("    if scale") : SOURCE.index("    return [scale")]
DIFFERENT = {
    "f": {
        "nothing refused": (VALIDATION, ""),
        "another error": ("raise ValueError", "raise KeyError"),
        "a keyword ignored": ("[scale * len", "[len"),
        "a parameter renamed": ("text, *, scale", "words, *, scale"),
        "a parameter gone": (SOURCE[SOURCE.index("def f") : SOURCE.index("async def")], "def f(text):\n    return 1\n\n\n"),
    },
    "fetched": {
        "a wrong value": ("[number] * times", "[number]"),
        "no coroutine": (FETCHED, "def fetched(number, times=1):\n    return [number] * times\n\n\n"),
    },
    "": {
        "data changed": ("LIMIT = 5", "LIMIT = 6"),
        "data gone": ("LIMIT = 5", ""),
        "an attribute of a class": ('"red"', '"blue"'),
        "a property": ("return len(self.text)", "return 7"),
        "an operator": ("return self.text[place]", "return self.text"),
        "a static method": ("return first + second", "return second + first"),
    },
}  # fmt: skip
SAME = {
    "f": {
        "another text": ('"negative scale"', '"below zero"'),
        "a helper refuses": (VALIDATION, "    _check(scale)\n"),
        "further parameters": ("scale=1", "scale=1, further=None"),
    },
    "fetched": {
        "a helper assigned": (FETCHED, FETCHED.replace("def fetched", "def _fetched") + "fetched = _fetched\n\n\n"),
        "a coroutine of a helper": (
            FETCHED,
            FETCHED.replace("def fetched", "def _fetched")
            + "def fetched(number, times=1):\n    return _fetched(number, times)\n\n\n",
        ),
    },
    "": {
        "a table of helpers": ('{"a": len}', '{"a": (lambda it: len(it))}'),
        "further data": ("LIMIT = 5", "LIMIT = 5\nMOST = 7"),
    },
}  # fmt: skip
HELPER = "\n\ndef _check(scale):\n    if scale < 0:\n        raise ValueError(scale)\n"
# Each answer in a fork: a module is imported once per process.
ANSWER = """
import json, os, sys
from ostinato.infra.sandbox.inside.trials.drawn_calls import draw_calls, make_drawn_calls

for mode, root, request, answer in json.load(sys.stdin):
    if os.fork() == 0:
        sys.path.insert(0, root)
        if mode == "try":
            with open(request["drawn"]) as file:
                request["calls"] = [json.loads(line) for line in file]
        {"draw": draw_calls, "try": make_drawn_calls}[mode](request, answer)
        os._exit(0)
    os.wait()
"""


def _folder(parent: Path, source: str) -> Path:
    folder = parent / f"{len(list(parent.iterdir()))}"
    folder.mkdir()
    (folder / "drawn_from.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """By function and name of a change, the calls that show something else than the original."""
    parent = tmp_path_factory.mktemp("drawn")
    runs: list[tuple[str, str, dict[str, Any], str]] = []
    answers: dict[tuple[str, str], Path] = {}
    original = _folder(parent, SOURCE + HELPER)

    def add(mode: str, folder: Path, request: dict[str, Any], answer: Path) -> Path:
        runs.append((mode, str(folder), request, str(answer)))
        return answer

    for symbol in ("f", "fetched", ""):
        name = f"drawn_from:{symbol}" if symbol else ""
        known = [json.dumps({"plain": [it], "named": {}}) for it in ("ab c", "some words")]
        request = {
            "root": str(original), "order": 5, "function": name, "has_shape": bool(symbol),
            "known": [{"function": name, "on": None, "arguments": it} for it in known] if symbol else [],
            "modules": [] if symbol else [["drawn_from", ["f", "fetched"]]],
        }  # fmt: skip
        drawn = add("draw", original, request, parent / f"drawn {symbol}")
        made = {"drawn": str(drawn), "seconds": 20.0, "worn": None, "luck": 1}
        answers[symbol, "original"] = add("try", original, made, parent / f"wanted {symbol}")
        for change, (old, new) in {**DIFFERENT[symbol], **SAME[symbol]}.items():
            assert old in SOURCE
            folder = _folder(parent, SOURCE.replace(old, new) + HELPER)
            answers[symbol, change] = add("try", folder, made, parent / f"{change} {symbol}")
    command = [sys.executable, "-c", ANSWER]
    subprocess.run(command, input=json.dumps(runs), text=True, check=True)
    shown = {
        key: [
            {name: line.get(name) for name in ("result", "takes")}
            for line in map(json.loads, answer.read_text().splitlines())
        ]
        for key, answer in answers.items()
    }
    return {
        key: [pair for pair in zip(lines, shown[key[0], "original"], strict=True) if pair[0] != pair[1]]
        for key, lines in shown.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("symbol", "change"), [(symbol, change) for symbol, it in DIFFERENT.items() for change in it]
)
def test_what_callers_rely_on_is_shown(
    differing: dict[tuple[str, str], list[Any]], symbol: str, change: str
) -> None:
    assert differing[symbol, change]


@pytest.mark.parametrize(
    ("symbol", "change"), [(symbol, change) for symbol, it in SAME.items() for change in it]
)
def test_what_is_written_otherwise_shows_the_same(
    differing: dict[tuple[str, str], list[Any]], symbol: str, change: str
) -> None:
    assert not differing[symbol, change]
