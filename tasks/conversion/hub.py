"""Models of the Hugging Face hub, fetched once into a cache with the hub's own layout."""

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import filter_repo_objects

from ostinato.infra.platform.cluster.workspace import replace_text
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.hub import ANSWER_SECONDS, UNREACHED, explaining
from ostinato.infra.platform.hub_names import HubRepository
from ostinato.infra.serving.published_models import CONFIG

# folders hold other forms of a model; `consolidated*` is Mistral's own form of the weights
_LEFT_OUT = ["*/*", "consolidated*"]
_WEIGHTS, _PICKLES = ".safetensors", (".bin", ".pt", ".pth")
_SHARD = re.compile(r".*-\d+-of-(\d+)\.safetensors")
INDEX = "model.safetensors.index.json"


def fetch_model(
    model: HubRepository,
    patterns: Sequence[str],
    cache: Path,
    scratch: Path,
    check: Callable[[str, Path], object],
) -> tuple[Path, str]:
    """(directory with the files of `patterns`, NAME@COMMIT). `check` gets that name and config.json
    before weights are fetched. A copy in the user's own cache of the hub is used; without a
    network, a cached copy of the revision.

    Raises ConfigError with model and fix before weights are fetched. Completed files are kept.
    """
    name, revision = model.repository, model.revision
    with explaining(model, "model", name, "directory"):
        try:
            info = HfApi().model_info(
                name, revision=revision, timeout=ANSWER_SECONDS, files_metadata=True
            )
        except UNREACHED:
            found = _find_copy(name, revision, patterns, cache) or _find_copy(
                name, revision, patterns
            )
            if found is None:
                raise
            return found, f"{name}@{found.name}"
        commit, place = str(info.sha), f"{name}@{info.sha}"
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = list(
            filter_repo_objects(sizes, allow_patterns=list(patterns), ignore_patterns=_LEFT_OUT)
        )
        own = _find_copy(name, commit, patterns)
        if own is not None and all((own / file).is_file() for file in wanted):
            return own, place
        _check_files(place, wanted, sizes)
        if info.gated:
            HfApi().auth_check(name)
        check(place, _snapshot(name, commit, [CONFIG], cache) / CONFIG)
        missing = sum(
            sizes[file]
            for file in wanted
            if not isinstance(try_to_load_from_cache(name, file, cache, commit), str)
        )
        _check_disk(place, missing, sum(sizes[file] for file in wanted), cache, scratch)
        fetched = _snapshot(name, commit, patterns, cache)
        _note_commit(fetched, revision)
        return fetched, place


def _find_copy(
    name: str, revision: str, patterns: Sequence[str], cache: Path | None = None
) -> Path | None:
    """The complete snapshot in a cache, by default the user's own. None: it is missing, or its
    download was interrupted.
    """
    try:
        found = _snapshot(name, revision, patterns, cache, is_local=True)
    except errors.LocalEntryNotFoundError:
        return None
    return found if is_whole(found) else None


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has configuration, tokenizer and all shards that its file names count."""
    names = {path.name for path in snapshot.iterdir() if path.is_file()}
    shards = [match for match in map(_SHARD.fullmatch, names) if match is not None]
    count = max((int(match[1]) for match in shards), default=0)
    has_weights = len(shards) == count and any(name.endswith(_WEIGHTS) for name in names)
    has_tokenizer = any(name.startswith("tokenizer.") for name in names)
    return has_weights and has_tokenizer and CONFIG in names and (count == 0 or INDEX in names)


def _snapshot(
    name: str, revision: str, patterns: Sequence[str], cache: Path | None, *, is_local: bool = False
) -> Path:
    found = snapshot_download(
        name,
        revision=revision,
        cache_dir=cache,
        allow_patterns=list(patterns),
        ignore_patterns=_LEFT_OUT,
        local_files_only=is_local,
    )
    return Path(found)


def _note_commit(snapshot: Path, revision: str) -> None:
    """Writes the commit of a branch or tag into the cache
    (https://huggingface.co/docs/hub/local-cache), where it is looked up without a network. The
    library does so only when it fetches by that name, which may have moved since.
    """
    if revision != snapshot.name:
        note = snapshot.parents[1] / "refs" / revision
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_text(note, snapshot.name)


def _check_files(place: str, wanted: Sequence[str], names: Iterable[str]) -> None:
    """Raises ConfigError unless the wanted files include weights, config.json and a tokenizer."""
    if any(name.endswith(_WEIGHTS) for name in wanted):
        for start, missing in {CONFIG: CONFIG, "tokenizer.": "tokenizer.json or .model"}.items():
            if not any(name.startswith(start) for name in wanted):
                raise ConfigError(
                    f"{place} holds no {missing}, wanted a complete model, not an adapter"
                )
        return
    found = {Path(name).suffix: name for name in names}
    if ".gguf" in found:
        raise ConfigError(
            f"{place} holds GGUF files only; give one of them as a file: hf download "
            f"{place.partition('@')[0]} {found['.gguf']} --local-dir . && ostinato import {found['.gguf']}"
        )
    pickled = next((found[suffix] for suffix in _PICKLES if suffix in found), None)
    held = f"pickled weights only ({pickled}), which are programs" if pickled else "no weights"
    raise ConfigError(
        f"{place} holds {held}, wanted {_WEIGHTS} files; give a revision that has them "
        "(@refs/pr/NUMBER), or convert the model with transformers' save_pretrained"
    )


def _check_disk(place: str, missing: int, whole: int, cache: Path, scratch: Path) -> None:
    """Raises ConfigError unless the download and the checkpoint, about as large as the model, fit."""
    scratch.mkdir(parents=True, exist_ok=True)
    needed = {cache: missing, scratch: whole}
    if cache.stat().st_dev == scratch.stat().st_dev:
        needed = {cache: missing + whole}
    for path, size in needed.items():
        free = shutil.disk_usage(path).free
        if free < size:
            raise ConfigError(
                f"{place} takes {missing / 1e9:.1f} GB to fetch and {whole / 1e9:.1f} GB as a checkpoint; "
                f"{free / 1e9:.1f} GB are free at {path}. Free space, or set OSTINATO_HOME or "
                "OSTINATO_CACHE_DIRECTORY to a larger disk"
            )
