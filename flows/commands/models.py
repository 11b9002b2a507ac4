"""`ostinato import` and `ostinato export`: conversion between published models and checkpoint artifacts."""

import contextlib
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from ostinato.flows.reporting.tables import interval
from ostinato.flows.stages.console import say
from ostinato.infra.platform.artifacts import ArtifactRef, open_artifacts
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.errors import ConfigError, boundary
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.objects import checksum_file
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.conversion.pinned import find_hub_model, find_pinned
from ostinato.tasks.records import Scorecard

KIND = "checkpoint"
EXPORT_MODEL = "ostinato.tasks.conversion.exporting:export_model"
EXPORT_ADAPTER = "ostinato.tasks.conversion.exporting:export_adapter"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def import_model(
    settings: Settings,
    place: str,
    name: str | None,
    chat_template: str | None = None,
    dialect: str | None = None,
) -> ArtifactRef:
    """The artifact of a published model. The same files under the same name give the same artifact.
    `chat_template`: a file or one of our names, in place of the model's own. `dialect`: in place of the
    one found in the template.
    """
    name = name or _name_of(place)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--as {name!r}, wanted lower-case letters, digits, '.', '_' and '-'")
    with boundary(ConfigError, f"import of {place}"):
        find_pinned(place)
    convert = load_entry("ostinato.tasks.conversion.importing:import_model")
    work = settings.home / "imports" / uuid.uuid4().hex
    work.mkdir(parents=True)
    try:
        directory = work / "checkpoint"
        with boundary(ConfigError, f"import of {place}"):
            cache = settings.cache_directory / "models"
            facts = convert(place, directory, cache, chat_template, dialect)
        artifacts = open_artifacts(settings)
        content = {
            path.relative_to(directory).as_posix(): checksum_file(path)
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        identity = artifacts.identify(KIND, name, content, {}, ())
        ref = artifacts.publish(identity, directory, {"summary": facts})
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(
        f"{facts['family']}, {facts['parameters']:,} parameters, {facts['vocabulary']:,} tokens, "
        f"{facts['dtype']}"
    )
    if facts["note"]:
        say(facts["note"])
    say(f"chat template: {facts['chat_template']}")
    say(f'calls: in a recipe, [harness] dialect = "{facts["dialect"]}"')
    if find_hub_model(place) is not None:
        say(f"commit: {facts['source']}")
    return ref


def export_model(
    settings: Settings,
    reference: str,
    directory: Path,
    dtype: str | None,
    *,
    with_gguf: bool = False,
) -> None:
    """Writes a checkpoint for transformers and vLLM, and with `with_gguf` also for llama.cpp."""
    options = {"dtype": dtype, "with_gguf": with_gguf}
    facts = _export(EXPORT_MODEL, settings, reference, directory, **options)
    say(f"{directory}: {facts['family']}, {facts['parameters']:,} parameters, {facts['dtype']}")
    if facts["draft_layers_left_out"]:
        say(f"{facts['draft_layers_left_out']} draft layers left out: no other engine loads them")


def export_adapter(settings: Settings, reference: str, directory: Path) -> None:
    """Writes the low-rank adapter of a checkpoint in the format of the PEFT library."""
    facts = _export(EXPORT_ADAPTER, settings, reference, directory)
    say(f"{directory}: adapters of {facts['layers']} layers, rank {facts['rank']}")


def _export(
    entry: str, settings: Settings, reference: str, directory: Path, **options: Any
) -> dict[str, Any]:
    """Exports a checkpoint with the child entry. Returns its facts."""
    checkpoint, lineage = _find(settings, reference)
    write = load_entry(entry)
    with boundary(ConfigError, f"export of {reference}"):
        scores = _scores(settings, lineage)
        card = {"name": reference, "lineage": lineage, "scores": scores}
        return write(checkpoint, directory, **card, **options)


def _find(settings: Settings, reference: str) -> tuple[Path, list[str]]:
    """Directory of a checkpoint, and the lineage of an artifact, itself first. A directory has no lineage."""
    if Path(reference).is_dir():
        return Path(reference), []
    artifacts = open_artifacts(settings)
    ref = artifacts.get(reference)
    lineage = [str(ref), *(str(parent) for parent in artifacts.lineage(ref))]
    return artifacts.local_copy(ref, settings.home), lineage


def _scores(settings: Settings, lineage: list[str]) -> list[str]:
    """A line per scorecard of the checkpoint itself, which is the first of the lineage."""
    with contextlib.closing(open_ledger(settings)) as ledger:
        rows = ledger.scorecards.of_checkpoint(lineage[0]) if lineage else []
    cards = [Scorecard.model_validate(row.payload) for row in rows]
    return [
        f"{card.suite}: {interval(card.average)} solved on average, {interval(card.best_of)} by the best of "
        f"{card.attempts_per_problem}, {len(card.problems)} problems, temperature {card.temperature:g}"
        for card in cards
    ]


def _name_of(place: str) -> str:
    """A valid name from the last part of a path or of a hub model, without file extensions."""
    model = find_hub_model(place)
    place = model.repository if model else place
    stem = re.sub(r"\.(gguf|whl|zip|tar|tgz|gz|xz|bz2)\b", "", Path(place).resolve().name)
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "model"
