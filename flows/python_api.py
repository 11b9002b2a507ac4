"""Python over the commands: `home = ostinato.open()` gives runs with their curves, attempts and checkpoints, and starts
flows. Imports neither torch nor Prefect.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.flows.commands.launching import FlowFailed, run_flow_process
from ostinato.flows.commands.models import export_model
from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.flows.recipe_text import describe_recipe
from ostinato.flows.stages.checkpoints import KINDS, NEWEST, checkpoint_named, refuse_unknown
from ostinato.flows.stages.declared import REINFORCEMENT, SCORECARD_JSON
from ostinato.flows.stages.forms import RunOptions, Suite
from ostinato.flows.stages.lineage import Ancestor, trace
from ostinato.flows.stages.suites import open_suite
from ostinato.infra.agent.endpoint import Endpoint
from ostinato.infra.platform.artifacts import ArtifactRef, open_artifacts
from ostinato.infra.platform.cluster.child_main import load_entry
from ostinato.infra.platform.cluster.workspace import METRICS
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.extras import say_missing
from ostinato.infra.platform.ledger import open_ledger
from ostinato.infra.platform.settings import Settings, check_home, load_settings
from ostinato.infra.platform.telemetry import read_metrics

if TYPE_CHECKING:
    import pandas

    from ostinato.flows.reporting.attempts import Attempt
    from ostinato.flows.reporting.evaluations import EvaluationReport

# Loaded by name: importing torch, matplotlib or SQLAlchemy would delay every command by seconds.
_FIND_ATTEMPTS = "ostinato.flows.reporting.attempts:find_attempts"
_REPORT = "ostinato.flows.reporting.evaluations:EvaluationReport"
_SAMPLE_TEXT = "ostinato.flows.chat.local:sample_text"


def evaluate(
    checkpoint: "CheckpointArtifact | str" = NEWEST, recipe: Recipe | str = "nano", **given: Any
) -> "EvaluationReport":
    """As `Home.evaluate`, in the home that the environment names."""
    return open_home().evaluate(checkpoint, recipe, **given)


def open_home(path: Path | str | None = None) -> "Home":
    """The home at a path. None: that of the environment variable OSTINATO_HOME, else `.ostinato` in the working folder.
    ConfigError when it is no folder that can be written.
    """
    settings = load_settings() if path is None else load_settings(home=path)
    check_home(settings.home)
    return Home(settings)


@dataclass(frozen=True)
class Home:
    """All data that this machine keeps: runs, artifacts, ledger."""

    settings: Settings

    @property
    def runs(self) -> list["ReinforcementRun"]:
        """RL runs with a finished step, oldest first."""
        places = (self.settings.home / "runs").glob(f"*/{REINFORCEMENT.kind}-*/{METRICS}")
        found = sorted(places, key=lambda file: file.stat().st_mtime)
        return [ReinforcementRun(self.settings, file.parent) for file in found]

    def run(self, name: str) -> "ReinforcementRun":
        """An RL run by its folder or id, or the newest one of a name such as nano-seed0."""
        named = ReinforcementRun(self.settings, Path(name).absolute())
        if Path(name).is_dir() and (named.directory / METRICS).exists():
            return named
        found = [run for run in self.runs if name in (run.name, run.run_id)]
        if not found:
            known = ", ".join(f"{run.name} ({run.run_id})" for run in self.runs)
            raise ConfigError(
                f"{name}: no RL run with a finished step, wanted one of {known or 'none'}"
            )
        return found[-1]

    def attempts(self, name: str) -> list["Attempt"]:
        """Attempts by the id of a trajectory, group, run, interaction or session. ConfigError when nothing has it."""
        return load_entry(_FIND_ATTEMPTS)(self.settings, name)

    @property
    def checkpoints(self) -> list["CheckpointArtifact"]:
        """All artifacts with weights, oldest first."""
        ledger = open_ledger(self.settings)
        artifacts = open_artifacts(self.settings, ledger)
        rows = [row for kind in KINDS for row in ledger.artifacts.list(kind)]
        rows.sort(key=lambda row: row.created_at)
        refs = (artifacts.get(f"{row.kind}/{row.name}@{row.version}") for row in rows)
        return [CheckpointArtifact(self.settings, ref) for ref in refs]

    def checkpoint(self, reference: str = NEWEST, recipe: str = "nano") -> "CheckpointArtifact":
        """A checkpoint: kind/name@version, `newest` of the recipe, or `champion` of the recipe's serving line."""
        ledger = open_ledger(self.settings)
        artifacts = open_artifacts(self.settings, ledger)
        ref = checkpoint_named(load_recipe(recipe), ledger, artifacts, reference)
        return CheckpointArtifact(self.settings, ref)

    def start(
        self,
        recipe: Recipe | str = "nano",
        flow: str = "agent_training",
        *,
        seed: int | None = None,
        options: RunOptions | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a flow and the stages it depends on, and returns its result as JSON values. A flow that was stopped goes
        on. `parameters`: others of the flow, such as {"start": "checkpoint/smollm2@1"}. Raises FlowFailed.
        """
        options, place = options or RunOptions(), self._place_of(recipe)
        return run_flow_process(self.settings, flow, place, seed, options, parameters)

    def _place_of(self, recipe: Recipe | str) -> str:
        """Name or path of a recipe. A changed one is written below the home, under a checksum of its text."""
        if isinstance(recipe, str):
            return recipe
        text = describe_recipe(recipe)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = self.settings.home / "recipes" / f"{recipe.name}-{digest}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def evaluate(
        self,
        checkpoint: "CheckpointArtifact | str" = NEWEST,
        recipe: Recipe | str = "nano",
        *,
        suite: str = Suite.BOTH,
        against: str | None = None,
        endpoint: Endpoint | None = None,
        seed: int | None = None,
        options: RunOptions | None = None,
        commit: str = "",
        report_directory: Path | None = None,
        is_watched: bool = False,
    ) -> "EvaluationReport":
        """Scores a checkpoint, or the model of an endpoint, on held-out problems or a suite and asks the gate. `against`:
        checkpoint that the gate compares with; None: the champion. FlowFailed when the evaluation itself fails.
        """
        options, place_of_recipe = options or RunOptions(), self._place_of(recipe)
        checkpoint = str(checkpoint)
        loaded = load_recipe(place_of_recipe, seed=seed, overrides=options.overrides)
        named = [*([] if endpoint else [checkpoint]), *([against] if against else [])]
        refuse_unknown(self.settings, loaded, named)
        open_suite(self.settings, suite, loaded.cycle.gate)
        with tempfile.TemporaryDirectory() as scratch:
            place = (report_directory or Path(scratch)).resolve()
            parameters = {
                "checkpoint": checkpoint,
                "suite": str(suite),
                "against": against,
                "endpoint": None if endpoint is None else endpoint.model_dump(mode="json"),
                "commit": commit,
                "report_directory": str(place),
            }
            try:
                run_flow_process(
                    self.settings,
                    "checkpoint_evaluation",
                    place_of_recipe,
                    seed,
                    options,
                    parameters,
                    is_watched=is_watched,
                )
            except FlowFailed:
                if not (place / SCORECARD_JSON).is_file():  # otherwise only the gate failed
                    raise
            text = (place / SCORECARD_JSON).read_text()
        return load_entry(_REPORT).model_validate_json(text)


@dataclass(frozen=True)
class ReinforcementRun:
    """An RL run."""

    settings: Settings
    directory: Path

    @property
    def name(self) -> str:
        """Name of the recipe with the seed, such as nano-seed0."""
        return self.directory.parent.name

    @property
    def run_id(self) -> str:
        """First part of the ids of the run's groups and trajectories."""
        return self.directory.name

    def metrics(self) -> "pandas.DataFrame":
        """A row for each finished step, with its index `step` and a column per metric. Needs pandas."""
        try:
            import pandas  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise ConfigError(say_missing("pandas", "notebook")) from None
        return pandas.DataFrame(read_metrics(self.directory / METRICS)).set_index("step")

    def attempts(self, *, solved: bool | None = None) -> list["Attempt"]:
        """The run's attempts, or only those that solved their problem or did not."""
        found = Home(self.settings).attempts(self.run_id)
        return [it for it in found if solved is None or it.is_solved is solved]


@dataclass(frozen=True)
class CheckpointArtifact:
    """An artifact with weights."""

    settings: Settings
    ref: ArtifactRef

    def __str__(self) -> str:
        return str(self.ref)

    @property
    def directory(self) -> Path:
        """Verified local copy of the files."""
        artifacts = open_artifacts(self.settings, open_ledger(self.settings))
        return artifacts.local_copy(self.ref, self.settings.home)

    def lineage(self) -> Ancestor:
        """The checkpoint with its ancestors, back to source archives."""
        return trace(self.settings, str(self.ref))

    def export(self, directory: Path | str, dtype: str | None = None) -> Path:
        """Writes a new directory that transformers and vLLM load. `dtype` None: as stored."""
        export_model(self.settings, str(self.ref), Path(directory), dtype)
        return Path(directory)

    def generate(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Continues a text in this process, by the engine that rollouts use. Temperature 0: always the likeliest token.
        Loads the weights at each call.
        """
        sample = load_entry(_SAMPLE_TEXT)
        made = sample(self.directory, prompt, max_new_tokens, temperature, seed)
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
            return thread.submit(asyncio.run, made).result()
