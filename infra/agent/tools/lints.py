"""Lint findings that an attempt's changes introduced into a file.

`find_lints` (ruff's syntax and pyflakes rules) and `new_lints` (findings against a baseline).
"""

import asyncio
import json
from collections import Counter

from ruff import find_ruff_bin

from ostinato.infra.platform.syntax import parse_python

LINT_RULES = "E9,F"  # syntax errors and everything pyflakes knows
LINTED_SUFFIXES = (".py", ".pyi")


async def find_lints(text: str, path: str) -> list[tuple[int, str]]:
    """Line and message of each finding of ruff (syntax and pyflakes rules) in Python text."""
    try:
        parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        return [(line or 1, f"SyntaxError {message}")]
    process = await asyncio.create_subprocess_exec(
        find_ruff_bin(),
        *("check", "--isolated", "--no-cache", "--quiet", "--output-format", "json"),
        *("--select", LINT_RULES, "--stdin-filename", path, "-"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
    findings = json.loads(output or b"[]")
    return [
        (finding["location"]["row"], f"{finding['code']} {finding['message']}")
        for finding in findings
    ]


async def new_lints(baseline: str | None, text: str, path: str) -> list[tuple[int, str]]:
    """Findings in `text` beyond those of `baseline` (None: the file is new), by message."""
    if baseline == text:
        return []
    before = Counter(message for _, message in await find_lints(baseline or "", path))
    new: list[tuple[int, str]] = []
    for line, message in await find_lints(text, path):
        if before[message]:
            before[message] -= 1
        else:
            new.append((line, message))
    return new
