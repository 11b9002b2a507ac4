"""The system's Chromium."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Path of the first that is there; AssertionError without one."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    assert found, f"none of {', '.join(NAMES)} on PATH, wanted one: apt-get install chromium"
    return found[0]
