"""The stages of the project, each declared once. Request, identity, parents and child call derive from the declaration.

A field of a request is, in this order: the directory of a parent (`corpus_directory` of the parent "corpus"), a value
given by the flow, the section of the recipe with the field's type, or the recipe's value of that name. A stage's
artifact is identified by its parents and its request, without directories and fields that only decide where it runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field

from ostinato.flows.recipe import Recipe
from ostinato.infra.platform.artifacts import Identity
from ostinato.infra.platform.cluster.workspace import Placed
from ostinato.infra.platform.record import Record
from ostinato.tasks.conversion.pipeline import OwnStageRequest, OwnStageResult
from ostinato.tasks.corpus.config import CorpusRequest, CorpusResult
from ostinato.tasks.evaluation.base_models.config import BaseMeasures, BaseSelectionRequest
from ostinato.tasks.evaluation.checkpoint.records import EvaluationRequest, EvaluationResult
from ostinato.tasks.evaluation.formats.config import FormatTrialRequest, FormatTrialResult
from ostinato.tasks.pretraining.config import PretrainingRequest, PretrainingResult
from ostinato.tasks.pretraining.mtp.config import (
    MtpRequest,
    MtpResult,
    SpeculationRequest,
    SpeculationResult,
)
from ostinato.tasks.problems.config import (
    EnvironmentsRequest,
    EnvironmentsResult,
    ProblemsRequest,
    ProblemsResult,
)
from ostinato.tasks.realtime.records import CycleTrainingRequest, CycleTrainingResult
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult
from ostinato.tasks.retrieval.config import RetrievalRequest, RetrievalResult

START_FILE = "stage.json"  # in the run directory of an unfinished stage
SCORECARD_JSON = "scorecard.json"  # in the folder for an evaluation's report
SUMMARY = "summary"  # key of an artifact's metadata: the stage's result as JSON
Result = TypeVar("Result", bound=BaseModel)
_PLACES = ("_directory", "_path", "run_id")  # endings of fields that hold a place on this machine
_TABLES: dict[Any, str] = {
    kind.annotation: name
    for name, kind in Recipe.model_fields.items()
    if isinstance(kind.annotation, type) and issubclass(kind.annotation, BaseModel)
}


class StageStart(Record):
    """The identity that an unfinished stage was started with."""

    identity: Identity
    fingerprint: str
    began_at: float
    flow_run_id: str | None = Field(
        default=None,
        description="Prefect's newest run that builds it; None: started outside of one",
    )
    changed_files: tuple[str, ...] = Field(default=(), description="code that changed since")


@dataclass(frozen=True)
class Stage:
    """A stage that the flow itself runs. Only its artifact is kept."""

    name: str  # on the command line
    kind: str  # of its artifacts
    entries: tuple[str, ...]  # code that decides the artifact's content; first: the child's entry
    trains: bool = False


@dataclass(frozen=True)
class ChildStage(Stage, Generic[Result]):
    """A stage that runs in a supervised child process."""

    request: type[BaseModel] = field(kw_only=True)
    result: type[Result] = field(kw_only=True)
    parents: tuple[str, ...] = field(kw_only=True, default=())  # in the order of its lineage
    placement: frozenset[str] = field(kw_only=True, default=frozenset())  # not in the identity
    file: str = field(kw_only=True, default="")  # file to publish the result in; empty: a folder

    def request_of(self, recipe: Recipe, given: Mapping[str, Any]) -> BaseModel:
        """The request from a recipe, with the given fields in place of the recipe's."""
        fields = dict(given)
        for name, kind in self.request.model_fields.items():
            source = _TABLES.get(kind.annotation, name)
            # a request's `sandbox` is a kind of box, the recipe's a table
            is_table = (
                name in _TABLES.values() and source == name and kind.annotation not in _TABLES
            )
            if name not in fields and source in Recipe.model_fields and not is_table:
                fields[name] = getattr(recipe, source)
        return self.request(**fields)

    def identity_of(self, request: BaseModel) -> dict[str, Any]:
        """The part of a request that decides what is made. Parents are not included."""
        apart: dict[str, Any] = dict.fromkeys(self.placement, True)
        apart |= {name: True for name in type(request).model_fields if name.endswith(_PLACES)}
        if isinstance(request, Placed):
            apart |= request.placement()
        return request.model_dump(mode="json", exclude=apart, exclude_defaults=True)

    def output_of(self, directory: Path, result: Result) -> tuple[Path, dict[str, Any]]:
        """The directory that a finished run publishes, and its metadata."""
        summary = result.model_dump(mode="json")
        if self.file:
            text = result.model_dump_json(indent=1)
            return one_file(directory, self.file, text), {SUMMARY: summary}
        return Path(summary.get("checkpoint_directory") or summary["directory"]), {SUMMARY: summary}


def one_file(directory: Path, name: str, text: str) -> Path:
    """Writes a directory to publish that holds only this file. Returns it."""
    published = directory / "published"
    published.mkdir(parents=True, exist_ok=True)
    (published / name).write_text(text)
    return published


def _child(
    name: str, kind: str, entry: str, request: type[BaseModel], result: type[Result], parents: str = "", *,
    trains: bool = False, placement: Collection[str] = (), file: str = "",
) -> ChildStage[Result]:  # fmt: skip
    return ChildStage(
        name, kind, (f"{entry}:main",), trains, request=request, result=result,
        parents=tuple(parents.split()), placement=frozenset(placement), file=file,
    )  # fmt: skip


_EVALUATION_PLACES = {
    "checkpoint_name", "endpoint", "engine_slots", "context_tokens", "processes"
}  # fmt: skip
# fmt: off
PROBLEMS = _child(
    "problems", "problems", "ostinato.tasks.problems.run", ProblemsRequest, ProblemsResult)
ENVIRONMENTS = _child(
    "environments", "environments", "ostinato.tasks.problems.environments.run",
    EnvironmentsRequest, EnvironmentsResult, "problems")
RETRIEVAL = _child(
    "retrieval", "search-encoder", "ostinato.tasks.retrieval.run",
    RetrievalRequest, RetrievalResult, trains=True)
CORPUS = _child(
    "corpus", "corpus", "ostinato.tasks.corpus.run", CorpusRequest, CorpusResult, "problems search")
PRETRAINING = _child(
    "pretraining", "pretrained", "ostinato.tasks.pretraining.run",
    PretrainingRequest, PretrainingResult, "corpus checkpoint", trains=True)
MTP = _child(
    "mtp", "drafted", "ostinato.tasks.pretraining.mtp.run",
    MtpRequest, MtpResult, "corpus checkpoint", trains=True)
SPECULATION = _child(
    "speculation", "speculation", "ostinato.tasks.pretraining.mtp.speculation",
    SpeculationRequest, SpeculationResult, "corpus checkpoint", file="speculation.json")
REINFORCEMENT = _child(
    "reinforcement", "reinforced", "ostinato.tasks.reinforcement.run",
    ReinforcementRequest, ReinforcementResult, "problems checkpoint search probes", trains=True)
EVALUATION = _child(
    "evaluation", "scorecard", "ostinato.tasks.evaluation.checkpoint.run",
    EvaluationRequest, EvaluationResult, "problems checkpoint search",
    placement=_EVALUATION_PLACES)
PROBING = _child(
    "probing", "probes", "ostinato.tasks.evaluation.checkpoint.run",
    EvaluationRequest, EvaluationResult, "problems checkpoint search", placement=_EVALUATION_PLACES)
BASE_SELECTION = _child(
    "base-selection", "base-measures", "ostinato.tasks.evaluation.base_models.run",
    BaseSelectionRequest, BaseMeasures, "problems checkpoint",
    placement={"sources", "humaneval"}, file="measures.json")
FORMAT_TRIAL = _child(
    "format-trial", "format-trial", "ostinato.tasks.evaluation.formats.run",
    FormatTrialRequest, FormatTrialResult, "problems checkpoint",
    placement={"processes"}, file="trial.json")
CANDIDATE = _child(
    "candidate", "candidate", "ostinato.tasks.realtime.cycle_training",
    CycleTrainingRequest, CycleTrainingResult, "checkpoint",
    trains=True, placement={"train_until"})
OWN_STAGE = _child(
    "own-stage", "derived", "ostinato.tasks.conversion.own_stage",
    OwnStageRequest, OwnStageResult, "problems checkpoint", trains=True)
ENDPOINT = Stage("endpoint", "endpoint", ("ostinato.infra.agent.endpoint",))
SUITE = Stage("suite", "suite", ("ostinato.tasks.problems.suites",))
CONTROLS = Stage("controls", "controls", ("ostinato.tasks.evaluation.controls",))
CYCLE = Stage(
    "cycle", "cycle",
    ("ostinato.tasks.realtime.traffic:main", *CANDIDATE.entries, *EVALUATION.entries,
     "ostinato.tasks.evaluation.gates"))
STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        PROBLEMS, ENVIRONMENTS, CORPUS, PRETRAINING, MTP, SPECULATION, PROBING, REINFORCEMENT, EVALUATION,
        OWN_STAGE, ENDPOINT, SUITE, BASE_SELECTION, FORMAT_TRIAL, CONTROLS, CANDIDATE, CYCLE, RETRIEVAL,
    )
}
# fmt: on
