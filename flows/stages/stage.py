"""Stages by identity: an artifact of the same settings, code and parents is never built twice. An
unfinished stage is resumed under the identity it was started with.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run
from pydantic import BaseModel

from ostinato.flows.recipe import Recipe
from ostinato.flows.recipe_differences import RECIPE_FILE
from ostinato.flows.stages.checkpoints import PROBLEM_KINDS, checkpoint_named
from ostinato.flows.stages.child_task import run_stage
from ostinato.flows.stages.declared import (
    OWN_STAGE,
    STAGES,
    START_FILE,
    ChildStage,
    Result,
    Stage,
    StageStart,
)
from ostinato.flows.stages.disk import refuse_small_disk
from ostinato.flows.stages.events import CREATED, send_checkpoint_event
from ostinato.flows.stages.forms import RunOptions
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts, Identity, Manifest
from ostinato.infra.platform.cluster.workspace import PUBLISHED, read_record, replace_text
from ostinato.infra.platform.code_identity import changed_files, installed_tree
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger, open_ledger
from ostinato.infra.platform.objects import ObjectStore, open_object_store
from ostinato.infra.platform.settings import Settings, load_settings
from ostinato.infra.platform.tracking.trackers import refuse_unknown_trackers
from ostinato.infra.sandbox.backends import check_kind

logger = logging.getLogger(__name__)

CHECKPOINT_KINDS = {"pretrained", "drafted", "reinforced", "candidate", OWN_STAGE.kind}


@dataclass(frozen=True)
class StageContext:
    """A recipe with the stores, settings and options of a run on this machine."""

    recipe: Recipe
    settings: Settings
    objects: ObjectStore
    ledger: Ledger
    artifacts: Artifacts
    options: RunOptions
    may_train: bool = True

    @classmethod
    def open(
        cls,
        recipe: str,
        seed: int | None = None,
        options: RunOptions | None = None,
        *,
        changes: Mapping[str, float | None] | None = None,
        may_train: bool = True,
    ) -> "StageContext":
        """Reads the recipe and opens ledger and object store. Errors name the key or URL. Refuses a recipe
        with sandboxes that this machine cannot run. `changes`: settings that override all others, unless
        None. `may_train`: whether stages that train may be built, or must already exist.
        """
        options = options or RunOptions()
        for key, value in (changes or {}).items():
            options = options.with_setting(key, value)
        loaded = options.recipe_of(recipe, seed)
        check_kind(loaded.rollout.sandbox)
        settings = load_settings()
        refuse_unknown_trackers(settings)
        objects, ledger = open_object_store(settings), open_ledger(settings)
        return cls(
            loaded, settings, objects, ledger, Artifacts(objects, ledger), options, may_train
        )

    def directory_of(self, ref: ArtifactRef) -> Path:
        """Verified local copy of an artifact."""
        return self.artifacts.local_copy(ref, self.settings.home)

    def parent_of(self, ref: ArtifactRef, stage_name: str) -> ArtifactRef | None:
        """The parent of an artifact that the named stage made. None when there is none. Added stages are
        looked through.
        """
        kind = STAGES[stage_name].kind
        parents = self.artifacts.manifest(self.shipped_origin(ref)).parents
        return next((parent for parent in parents if parent.kind == kind), None)

    def shipped_origin(self, ref: ArtifactRef) -> ArtifactRef:
        """The checkpoint of a shipped stage from which added stages derived this one. Others are returned as given."""
        while ref.kind == OWN_STAGE.kind:
            ref = self.artifacts.manifest(ref).parents[-1]
        return ref

    def problem_set(self, given: ArtifactRef | str | None) -> ArtifactRef | None:
        """The problem set that a flow was given as an artifact or by name. None when none was given."""
        found = self.artifacts.get(given) if isinstance(given, str) else given
        if found is not None and found.kind not in PROBLEM_KINDS:
            raise ConfigError(
                f"artifact {found} is not a problem set, wanted one of the kinds {', '.join(PROBLEM_KINDS)}"
            )
        return found

    def checkpoint(self, given: ArtifactRef | str | None) -> ArtifactRef | None:
        """The checkpoint that a flow was given as an artifact, kind/name@version, `champion` or `newest`.
        None when none was given.
        """
        return self.checkpoint_named(given) if isinstance(given, str) else given

    def checkpoint_named(self, reference: str) -> ArtifactRef:
        """The checkpoint of `champion`, `newest` or kind/name@version. ConfigError when it is missing."""
        return checkpoint_named(self.recipe, self.ledger, self.artifacts, reference)

    def run_directory(self, kind: str, identity: str) -> Path:
        """Directory of a stage's work. A stage of the same identity resumes in it."""
        return self.runs_directory / f"{kind}-{identity}"

    def shipped_run_directory(self, ref: ArtifactRef) -> Path:
        """Directory of the shipped stage's run behind a checkpoint."""
        origin = self.shipped_origin(ref)
        return self.run_directory(origin.kind, origin.fingerprint)

    def make(
        self,
        stage: ChildStage[Result],
        parents: Mapping[str, ArtifactRef | None],
        *,
        title: str = "",
        identity: Mapping[str, Any] | None = None,
        publish: Callable[[Path, Result], tuple[Path, dict]] | None = None,
        **given: Any,
    ) -> ArtifactRef:
        """The artifact of a stage under this recipe, built by its child process at most once.

        `parents`: by the names of the stage's declaration; None omits a parent. `given`: request fields
        that the recipe does not hold. `identity`: identifying values in addition to the request.
        `publish`: returns the directory to publish and its metadata; by default those of the result.
        """
        known = {name: ref for name in stage.parents if (ref := parents.get(name)) is not None}
        folders = {f"{name}_directory": ref for name, ref in known.items()}
        folders = {name: folders[name] for name in folders.keys() & stage.request.model_fields}
        # parents are only downloaded if the stage is built, so the request names no directories yet
        request = stage.request_of(self.recipe, given | dict.fromkeys(folders, ""))

        def build(directory: Path) -> tuple[Path, dict]:
            here = {name: str(self.directory_of(ref)) for name, ref in folders.items()}
            here |= {"run_id": directory.name} if "run_id" in given else {}
            placed = request.model_copy(update=here)
            entry = stage.entries[0]
            result = run_stage(title or stage.name, entry, placed, stage.result, directory)
            return (publish or stage.output_of)(directory, result)

        settings = stage.identity_of(request) | dict(identity or {})
        return self.ensure(stage.name, settings, tuple(known.values()), build)

    def ensure(
        self,
        stage_name: str,
        settings: BaseModel | dict,
        parents: Sequence[ArtifactRef],
        build: Callable[[Path], tuple[Path, dict]],
    ) -> ArtifactRef:
        """The artifact of a stage with these settings and parents and today's code, built at most once.

        `build` receives the run directory and returns the directory to publish and its metadata.
        """
        stage = STAGES[stage_name]
        code = installed_tree(self.settings.cache_directory).code_of(
            stage.entries, plugins=frozenset(_strings_in(settings))
        )
        identity = self.artifacts.identify(stage.kind, self.recipe.name, settings, code, parents)
        known = self.artifacts.made_with(identity)
        ref = self._reusable(stage, identity, known)
        if ref is not None:
            return ref
        if stage.trains and not self.may_train:
            raise ConfigError(
                f"no artifact {stage.kind}/{self.recipe.name} of these settings and this code, wanted "
                f"one: nothing is trained here; `ostinato demo --recipe {self.recipe.name}` trains "
                f"it, --keep {stage.name} accepts one that other code made"
            )
        start = self._unfinished_start(identity, exactly=stage.name in self.options.rebuild)
        if start is None:
            if stage.trains:
                refuse_small_disk(self.recipe, self.settings.home, self.runs_directory)
            _log_rebuild(stage, identity, known)
            start = _new_start(identity, known)
        else:
            _log_resumed(stage, start)
        start = start.model_copy(update={"flow_run_id": flow_run.id})
        directory = self.run_directory(stage.kind, start.fingerprint)
        directory.mkdir(parents=True, exist_ok=True)
        replace_text(directory / START_FILE, start.model_dump_json(indent=1))
        replace_text(directory / RECIPE_FILE, self.recipe.model_dump_json(indent=1))
        made, metadata = build(directory)
        ref = self.artifacts.publish(
            identity,
            made,
            metadata,
            fingerprint=start.fingerprint,
            changed_files=start.changed_files,
        )
        replace_text(directory / PUBLISHED, str(ref))
        if ref.kind in CHECKPOINT_KINDS:
            send_checkpoint_event(
                CREATED, str(ref), fingerprint=ref.fingerprint, recipe=self.recipe.name
            )
        return ref

    @property
    def runs_directory(self) -> Path:
        """Directory of all stages' unfinished work under this recipe and seed."""
        return self.settings.home / "runs" / f"{self.recipe.name}-seed{self.recipe.seed}"

    def _reusable(
        self, stage: Stage, identity: Identity, known: list[tuple[ArtifactRef, Manifest]]
    ) -> ArtifactRef | None:
        if stage.name in self.options.keep:
            if not known:
                raise ConfigError(
                    f"--keep {stage.name}: no artifact {stage.kind}/{self.recipe.name} of these "
                    "settings is known, wanted one; run once without it"
                )
            logger.info("stage=%s artifact=%s kept=as_asked", stage.name, known[0][0])
            return known[0][0]
        exact = {identity.fingerprint(number) for number in range(len(known) + 1)}
        since = self.options.rebuild_since if stage.name in self.options.rebuild else None
        for ref, manifest in known:
            is_same = ref.fingerprint in exact or (
                manifest.code == identity.code and manifest.parents == identity.parents
            )
            if is_same and (since is None or manifest.created_at >= since):
                logger.info(
                    "stage=%s fingerprint=%s skipped=already_built", stage.name, ref.fingerprint
                )
                return ref
        return None

    def _unfinished_start(self, identity: Identity, *, exactly: bool) -> StageStart | None:
        """The newest unfinished start with the same settings and parents, if any. `exactly`: also the same code."""
        found = []
        for path in self.runs_directory.glob(f"{identity.kind}-*/{START_FILE}"):
            start = read_record(path, StageStart)
            if start is None or start.identity.parents != identity.parents:
                continue
            if start.identity.settings_fingerprint != identity.settings_fingerprint:
                continue
            if exactly and start.identity.code != identity.code:
                continue
            if self.artifacts.find(identity.kind, identity.name, start.fingerprint) is None:
                found.append(start)
        if not found:
            return None
        newest = max(found, key=lambda start: start.began_at)
        changed = {*newest.changed_files, *changed_files(newest.identity.code, identity.code)}
        return newest.model_copy(update={"changed_files": tuple(sorted(changed))})


def _new_start(identity: Identity, known: Sequence[tuple[ArtifactRef, Manifest]]) -> StageStart:
    built = {ref.fingerprint for ref, _ in known}
    repetition = 0
    while identity.fingerprint(repetition) in built:
        repetition += 1
    return StageStart(
        identity=identity, fingerprint=identity.fingerprint(repetition), began_at=time.time()
    )


def _log_rebuild(
    stage: Stage, identity: Identity, known: Sequence[tuple[ArtifactRef, Manifest]]
) -> None:
    if not known:
        return
    ref, manifest = known[0]
    changed = changed_files(manifest.code, identity.code)
    why = f"changed since {ref}: {', '.join(changed)}" if changed else f"other parents than {ref}"
    if not changed and manifest.parents == identity.parents:
        why = f"requested, in addition to {ref}"
    logger.warning("stage %s is built again (%s); --keep %s reuses it", stage.name, why, stage.name)


def _log_resumed(stage: Stage, start: StageStart) -> None:
    if start.changed_files:
        logger.warning(
            "stage %s resumes its work of %s; code changed since: %s; --rebuild %s starts anew",
            stage.name,
            start.fingerprint,
            ", ".join(start.changed_files),
            stage.name,
        )


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)
