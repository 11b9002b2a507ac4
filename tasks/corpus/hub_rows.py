"""Conversations from a data set of the Hugging Face hub, fetched once and kept as one file of JSON lines."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.hub import ANSWER_SECONDS, UNREACHED, explaining
from ostinato.infra.platform.hub_names import HubRepository
from ostinato.infra.platform.row_files import ROW_SUFFIXES, read_rows

_TRAINING = "train"  # in the path of a file of the training split
_NEWEST = "newest"  # file with the commit that a branch or tag had when it was last asked for


def fetch_rows(data: HubRepository, cache: Path) -> Path:
    """JSON lines of the data set's training files, or of all when none is named so. Without a network the rows that
    were fetched last. ConfigError with name and fix.
    """
    folder = cache / "datasets" / data.repository.replace("/", "--")
    with explaining(data, "data set", f"datasets/{data.repository}", "file"):
        try:
            info = HfApi().dataset_info(
                data.repository, revision=data.revision, timeout=ANSWER_SECONDS
            )
        except UNREACHED:
            kept = _kept(folder, data.revision)
            if kept is None:
                raise
            return kept
        commit = str(info.sha)
        rows = folder / f"{commit}.jsonl"
        if not rows.exists():
            names = _chosen(data, [file.rfilename for file in info.siblings or ()])
            files = [
                hf_hub_download(
                    data.repository, name, repo_type="dataset", revision=commit, cache_dir=cache
                )
                for name in names
            ]
            folder.mkdir(parents=True, exist_ok=True)
            partial = rows.with_suffix(".partial")
            with partial.open("w") as written:
                written.writelines(_lines(files))
            partial.replace(rows)
        replace_text(folder / f"{_NEWEST}-{data.revision.replace('/', '--')}", commit)
    return rows


def _kept(folder: Path, revision: str) -> Path | None:
    note = folder / f"{_NEWEST}-{revision.replace('/', '--')}"
    commit = note.read_text() if note.exists() else revision
    rows = folder / f"{commit}.jsonl"
    return rows if rows.exists() else None


def _chosen(data: HubRepository, names: list[str]) -> list[str]:
    known = sorted(name for name in names if name.endswith(ROW_SUFFIXES))
    if not known:
        raise ConfigError(
            f"{data} holds no file ending in {' or '.join(ROW_SUFFIXES)}, wanted conversations; it holds "
            f"{', '.join(sorted(names)[:8]) or 'nothing'}"
        )
    return [name for name in known if _TRAINING in name] or known


def _lines(files: Iterable[str]) -> Iterator[str]:
    for file in files:
        for _, row in read_rows(Path(file), ROW_SUFFIXES):
            yield json.dumps(row, ensure_ascii=False) + "\n"
