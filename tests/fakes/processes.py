"""Processes that may end while a test looks at them."""

import psutil


def command_line(process: psutil.Process) -> str:
    """Its command; empty when it has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
