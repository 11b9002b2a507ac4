"""Paths that clients may give to files of a repository."""

from pathlib import PurePosixPath

MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 2_000  # Linux takes 4,095 with all above
WANTED = (
    f"inside the repository that is no folder, below no file, and of at most {MOST_NAME_BYTES} bytes a "
    f"name and {MOST_PATH_BYTES} in all"
)


def is_path(text: str) -> bool:
    """Whether a file of this relative path can lie in some folder."""
    pure = PurePosixPath(text)
    is_inside = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts
    try:
        names = [len(part.encode()) for part in pure.parts]
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False
    has_room = max(names, default=0) <= MOST_NAME_BYTES and sum(names) < MOST_PATH_BYTES
    return is_inside and "\0" not in text and str(pure) == text and has_room
