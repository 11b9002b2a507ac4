"""Source archives of packages, fetched once through pip and kept.

Owns the archive cache: one file a package and version beside its SHA-256. Leaves: an unpacked
archive in memory. It talks to the index only through pip, and not at all when the archive is
cached.
"""

import hashlib
import logging
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from infra.errors import ProblemError
from tasks.problems.config import RepositorySource

_logger = logging.getLogger(__name__)
_FETCH_SECONDS = 300
_MAX_ARCHIVE_BYTES = 64 << 20
_SUFFIXES = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz")


def fetch_archive(source: RepositorySource, cache: Path) -> Path:
    """The cached source archive.

    Pip downloads it on the first call. ProblemError says how to supply it by hand.
    """
    folder = cache / f"{source.name}-{source.version}"
    known = _find_archive(folder)
    if known is None:
        _download(source, folder)
        known = _find_archive(folder)
    if known is None:
        raise ProblemError(_explain(source, folder, "pip saved no source archive"))
    found = hashlib.sha256(known.read_bytes()).hexdigest()
    wanted = source.sha256 or _read_checksum(folder, found)
    if found != wanted:
        raise ProblemError(
            f"source archive {known} of {source.name}=={source.version} has sha256 {found}, "
            f"wanted {wanted}; delete it"
        )
    return known


def fetch_wheel(requirement: str, cache: Path) -> Path:
    """The cached wheel of `name==version`, which a repository needs beside it; as `fetch_archive`."""
    name, _, version = requirement.partition("==")
    if not name or not version:
        raise ProblemError(f"dependency {requirement!r}, wanted name==version")
    source = RepositorySource(
        name=name, version=version, package_paths=(), test_paths=(), mutated_paths=()
    )
    folder = cache / "wheels" / f"{name}-{version}"
    if not list(folder.glob("*.whl")):
        _download(source, folder, form="--only-binary")
    return next(iter(sorted(folder.glob("*.whl"))))


def read_wheel(wheel: Path) -> dict[str, bytes]:
    """Python files and data of a wheel by path, without compiled modules, metadata and tests."""
    return {
        path: content
        for path, content in _zip_members(wheel)
        if not path.endswith((".so", ".pyd", ".pyi", ".c", ".h"))
        and ".dist-info/" not in path
        and ".data/" not in path
        and "/tests/" not in path
    }


def read_archive(archive: Path) -> dict[str, bytes]:
    """Regular files of an archive by path below its top folder.

    Links and paths that leave the folder are refused.
    """
    files: dict[str, bytes] = {}
    total_bytes = 0
    members = _zip_members(archive) if archive.suffix == ".zip" else _tar_members(archive)
    for name, content in members:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise ProblemError(
                f"archive {archive} holds the path {name!r}, wanted paths below its top folder"
            )
        total_bytes += len(content)
        if total_bytes > _MAX_ARCHIVE_BYTES:
            raise ProblemError(f"archive {archive} unpacks to more than {_MAX_ARCHIVE_BYTES} bytes")
        if len(pure.parts) > 1:
            files[PurePosixPath(*pure.parts[1:]).as_posix()] = content
    return files


def _find_archive(folder: Path) -> Path | None:
    found = [path for path in sorted(folder.glob("*")) if path.name.endswith(_SUFFIXES)]
    return found[0] if found else None


def _read_checksum(folder: Path, found: str) -> str:
    """The checksum noted when the archive came; noted now when it is new."""
    note = folder / "sha256"
    if not note.exists():
        note.write_text(found)
    return note.read_text().strip()


def _download(source: RepositorySource, folder: Path, form: str = "--no-binary") -> None:
    """Download next to the final place and move, so that a killed download leaves nothing half
    done.

    Only this package must come as source: its build backend may come as a wheel, which pip installs
    in isolation to read the archive's metadata (toolz needs a plugin for that, or pip sees version
    0.0.0 and refuses).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", form, source.name, "--dest", temporary),
            f"{source.name}=={source.version}",
        ]
        _logger.info("package=%s version=%s fetching=source_archive", source.name, source.version)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ProblemError(
                _explain(source, folder, f"pip did not end in {_FETCH_SECONDS} s")
            ) from error
        if done.returncode != 0:
            raise ProblemError(
                _explain(source, folder, (done.stderr or done.stdout).strip()[-600:])
            )
        folder.mkdir(exist_ok=True)
        for path in Path(temporary).iterdir():
            path.replace(folder / path.name)


def _explain(source: RepositorySource, folder: Path, why: str) -> str:
    return (
        f"source archive of {source.name}=={source.version} is missing: {why}\n"
        "fix: check the network and pip's index settings, or put the package's .tar.gz into "
        f"{folder}"
    )


def _tar_members(archive: Path) -> list[tuple[str, bytes]]:
    try:
        with tarfile.open(archive) as tar:
            opened = [
                (member.name, tar.extractfile(member))
                for member in tar.getmembers()
                if member.isreg()
            ]
            return [(name, file.read()) for name, file in opened if file is not None]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ProblemError(
            f"archive {archive} cannot be read: {error}; delete it to fetch it again"
        ) from error


def _zip_members(archive: Path) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(archive) as zipped:
            return [
                (info.filename, zipped.read(info))
                for info in zipped.infolist()
                if not info.is_dir()
            ]
    except (zipfile.BadZipFile, OSError) as error:
        raise ProblemError(
            f"archive {archive} cannot be read: {error}; delete it to fetch it again"
        ) from error
