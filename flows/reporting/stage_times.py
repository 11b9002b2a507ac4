"""How long each stage of a run took, from what stages record: their start in the run directory, their
end in the artifact.
"""

import time
from collections.abc import Mapping

from ostinato.flows.stages.curves.report import StageTime
from ostinato.flows.stages.run_options import START_FILE, StageStart
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.workspace import read_record
from ostinato.infra.platform.errors import StorageError


def stage_times(context: StageContext, refs: Mapping[str, ArtifactRef]) -> list[StageTime]:
    """What the named artifacts and all that they were made from took, in order of their ends. Nothing of
    an artifact that was removed since.
    """
    found, ended = dict(refs), dict[str, float]()
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        try:
            manifest = context.artifacts.manifest(found[name])
        except StorageError:
            continue
        ended[name] = manifest.created_at
        for parent in manifest.parents:
            if parent not in found.values():
                found[str(parent)] = parent
                waiting.append(str(parent))
    names = sorted(ended, key=lambda name: ended[name])
    return [_time_of(context, name, found[name], ended[name]) for name in names]


def _time_of(context: StageContext, name: str, ref: ArtifactRef, ended_at: float) -> StageTime:
    place = context.run_directory(ref.kind, ref.fingerprint)
    start = read_record(place / START_FILE, StageStart)
    if start is None:
        return StageTime(name, "not here", "not known")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began_at))
    return StageTime(name, began, f"{ended_at - start.began_at:.0f}")
