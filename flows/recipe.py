"""The recipe of a run: sparse TOML in, one frozen and complete record out. The settings of the machine
it runs on are in infra/platform/settings.py.
"""

import contextlib
import re
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from ostinato.flows.recipe_mistakes import MAX_DEPTH, explain_mistakes, refuse_numbers
from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.artifacts import open_artifacts
from ostinato.infra.platform.bounded_files import parse_json, read_bounded
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.plugins import VERIFIERS
from ostinato.infra.platform.record import Record, dotted
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.infra.sandbox.protocol import SandboxKind
from ostinato.infra.serving.engine.extensions import ENGINES
from ostinato.models.decode.config import DecodingConfig
from ostinato.models.decode.supported import check_vectors
from ostinato.models.spec import ModelSpec
from ostinato.models.training.config import DEMONSTRATIONS
from ostinato.tasks.conversion.pipeline import PipelineConfig
from ostinato.tasks.corpus.config import SHARDS, CorpusConfig
from ostinato.tasks.evaluation.base_models.config import BaseSelectionConfig
from ostinato.tasks.evaluation.config import ControlsConfig, EvaluationConfig, Prices
from ostinato.tasks.evaluation.formats.config import FormatTrialConfig
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.environments import EnvironmentConfig, refuse_absent
from ostinato.tasks.pretraining.config import PretrainingConfig
from ostinato.tasks.pretraining.mtp.config import MtpConfig, SpeculationConfig
from ostinato.tasks.problems.config import ProblemsConfig, ProblemSelection
from ostinato.tasks.realtime.config import TEST_LINE, CycleConfig, ServingConfig
from ostinato.tasks.reinforcement.learning.config import LearningConfig
from ostinato.tasks.reinforcement.records import ReinforcementConfig
from ostinato.tasks.retrieval.config import RetrievalConfig
from ostinato.tasks.rollout.config import RolloutConfig

RECIPES = Path(__file__).parent / "recipes"
BASE_SPEC = "spec.json"  # file of a checkpoint that holds the model's shape
_REFERENCE = re.compile(r"[a-z_-]+/[\w.-]+@\d+")  # of an artifact
_BARE_WORD = re.compile(r"[A-Za-z_][\w./:+@-]*")  # a string that needs no quotes on a command line


class RetentionConfig(Record):
    """Checkpoints of the recipe that `ostinato gc --recipe` keeps in the object store. All by default."""

    checkpoints_per_line: int | None = Field(default=None, ge=2)
    """newest promoted checkpoints of the serving line to keep: the champion and those to roll back to;
    None: all"""
    days: float | None = Field(default=None, ge=0)
    """age in days after which a checkpoint is removed, unless a kept checkpoint descends from it; None: never"""


class Recipe(Record):
    """One run of the whole chain."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """names artifacts and run directories"""
    seed: int = Field(default=0, ge=0, description="seed of all random draws")
    description: str = ""
    """purpose of the recipe, shown by `ostinato recipe list` and in reports"""
    base_checkpoint: str = ""
    """checkpoint to continue from: a reference as `ostinato import` prints it, or a directory,
    relative to the repository; empty: random weights"""
    model: ModelSpec
    pipeline: PipelineConfig = PipelineConfig()
    problems: ProblemsConfig = ProblemsConfig()
    selection: ProblemSelection = ProblemSelection()
    environments: dict[str, EnvironmentConfig] = Field(default={})
    """problems drawn from environments of installed packages, by the environments' names; a plain list of
    names takes each with the default settings"""
    corpus: CorpusConfig = CorpusConfig()
    pretraining: PretrainingConfig
    mtp: MtpConfig
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    learning: LearningConfig = LearningConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    decoding: DecodingConfig = DecodingConfig()
    reinforcement: ReinforcementConfig = ReinforcementConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    prices: dict[str, Prices] = Field(default={})
    """prices of tokens by model, as shell patterns of its name on scorecards, such as *; the first match holds"""
    controls: ControlsConfig = ControlsConfig()
    base_selection: BaseSelectionConfig = BaseSelectionConfig()
    format_trial: FormatTrialConfig = FormatTrialConfig()
    cycle: CycleConfig = CycleConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    serving: ServingConfig = ServingConfig()
    retention: RetentionConfig = RetentionConfig()

    @classmethod
    def load(cls, name_or_path: str, *, seed: int | None = None) -> "Recipe":
        """A shipped recipe by name, or a TOML file by path."""
        return load_recipe(name_or_path, seed=seed)

    def with_(self, changes: Mapping[str, Any]) -> "Recipe":
        """This recipe with other values of settings, such as {"rollout.group_size": 4}. None removes a table."""
        values = self.model_dump(mode="json")
        for key, value in changes.items():
            _set(values, key, value)
        return _validated(values, self.name)

    def served_line(self, requested: str | None, known: Collection[str]) -> str | None:
        """The line that a gateway serves: the requested one, else the recipe's, if it has one. ConfigError
        when the requested one is unknown, and when none is requested and the recipe's is the line of tests.
        `known`: lines that have a champion.
        """
        if requested is not None:
            self.require_line(requested, known)
        elif self.serving.line == TEST_LINE:
            raise ConfigError(
                f"recipe {self.name!r} has the serving line {TEST_LINE!r}, on which checkpoints may "
                f"solve nothing, wanted --line {TEST_LINE} to serve it nevertheless"
            )
        return requested or self.serving.line

    def require_line(self, line: str, known: Collection[str]) -> None:
        """ConfigError for a serving line that is not the recipe's and has no champion."""
        lines = {*known, TEST_LINE, self.serving.line or TEST_LINE}
        if line not in lines:
            raise ConfigError(f"--line {line} is no serving line, wanted one of {sorted(lines)}")

    @model_validator(mode="after")
    def _users_have_a_floor(self) -> "Recipe":
        if self.cycle.gate.floor == 0 and self.serving.line not in (None, TEST_LINE):
            raise ValueError(
                f"cycle.gate.floor is 0 on the serving line {self.serving.line!r}, wanted more: "
                f"only the line {TEST_LINE!r} may serve a checkpoint that solves nothing"
            )
        return self

    @model_validator(mode="after")
    def _layout_fits_the_model(self) -> "Recipe":
        for name in ("pretraining", "learning"):
            try:
                getattr(self, name).parallel_layout.check(self.model)
            except ValueError as error:
                raise ValueError(f"{name}.layout: {error}") from None
        return self

    @model_validator(mode="after")
    def _engine_decodes_the_model(self) -> "Recipe":
        ENGINES.refuse_unknown([self.decoding.engine])
        if self.decoding.engine == "local":
            try:
                check_vectors(self.model)
            except ValueError as error:
                raise ValueError(f"model.{error}") from None
        return self

    @model_validator(mode="after")
    def _a_start_is_there(self) -> "Recipe":
        if not (self.pretraining.phases or self.base_checkpoint):
            raise ValueError(
                "pretraining.phases is empty without base_checkpoint, wanted one of them: RL begins with a "
                "pretrained model"
            )
        if self.mtp.depth and not self.mtp.phases:
            raise ValueError(f"mtp.phases is empty with mtp.depth={self.mtp.depth}, wanted a phase")
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> "Recipe":
        if self.pretraining.lora is not None and not self.base_checkpoint:
            raise ValueError(
                "pretraining.lora without base_checkpoint, wanted one: adapters are trained on top of "
                "pretrained weights"
            )
        return self

    @model_validator(mode="after")
    def _program_has_boxes(self) -> "Recipe":
        rollout = self.rollout
        wrong = {
            "rollout.boxes": (rollout.boxes, "worker"),
            "rollout.sandbox": (rollout.sandbox, SandboxKind.NAMESPACE),
            "rollout.forked_share": (rollout.forked_share, 0.0),
        }
        for name, (seen, wanted) in wrong.items():
            if seen != wanted and not self.harness.is_builtin:
                raise ValueError(
                    f"{name} is {seen!r} with harness.program {self.harness.program!r}, wanted {wanted!r}: "
                    "only such boxes can see the program's files and its session, and a program cannot be forked"
                )
        held = [name for name in self.environments if name.startswith(VERIFIERS)]
        if held and not self.harness.is_builtin:
            raise ValueError(
                f"environments names {held[0]!r} with harness.program {self.harness.program!r}, wanted "
                "'builtin': such an environment runs the dialogue itself"
            )
        return self

    @model_validator(mode="after")
    def _network_reaches_boxes(self) -> "Recipe":
        rollout, allow = self.rollout, self.sandbox.egress.allow
        wanted = {"boxes": "worker", "sandbox": SandboxKind.NAMESPACE}
        for name, value in wanted.items():
            if allow and (seen := getattr(rollout, name)) != value:
                raise ValueError(
                    f"rollout.{name} is {seen!s} with sandbox.egress.allow {list(allow)}, wanted {value!s}: only such "
                    "boxes can see the socket of the attempt's proxy"
                )
        return self

    @model_validator(mode="after")
    def _contexts_fit_the_model(self) -> "Recipe":
        lengths = {"harness.context_tokens": self.harness.context_tokens}
        for phase in self.pretraining.phases:
            lengths[f"pretraining phase {phase.name!r}: sequence_tokens"] = phase.sequence_tokens
        longest = self.model.max_sequence_tokens
        for name, tokens in lengths.items():
            if tokens > longest:
                raise ValueError(
                    f"{name}={tokens}, wanted at most model.max_sequence_tokens={longest}"
                )
        return self

    @model_validator(mode="after")
    def _blends_name_what_the_corpus_makes(self) -> "Recipe":
        known = (*SHARDS, DEMONSTRATIONS)
        for section in ("pretraining", "mtp"):
            for phase in getattr(self, section).phases:
                if unknown := sorted(phase.blend.keys() - {*known}):
                    raise ValueError(
                        f"{section} phase {phase.name!r}: blend names {unknown[0]!r}, wanted one of "
                        f"{', '.join(known)}"
                    )
        return self

    @model_validator(mode="after")
    def _draft_layers_are_there(self) -> "Recipe":
        name, follows = self.mtp.after_phase, self.learning.trains_drafts
        if (name or follows) and not self.mtp.depth:
            key = f"mtp.after_phase={name!r}" if name else "learning.trains_drafts=true"
            raise ValueError(f"{key} with mtp.depth=0, wanted draft layers")
        if name:
            self.pretraining.cut_after(name)
        return self

    @field_validator("environments", mode="before")
    @classmethod
    def _named_environments(cls, environments: object) -> object:
        if isinstance(environments, list):
            return {str(name): EnvironmentConfig() for name in environments}
        return environments

    @field_validator("environments")
    @classmethod
    def _known_environments(
        cls, environments: dict[str, EnvironmentConfig]
    ) -> dict[str, EnvironmentConfig]:
        refuse_absent(environments)
        return environments


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(
    name_or_path: str,
    *,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """Reads a shipped recipe by name or a TOML file by path. `changes` are merged into it, then
    `overrides`, each `section.key=value` with a value in TOML syntax or null.

    ConfigError names the file, the key, the value seen and the value wanted.
    """
    path = _find_recipe(name_or_path)
    values = _merged(_read_toml(path), changes or {})
    if seed is not None:
        values["seed"] = seed
    for override in overrides:
        _apply(values, override)
    fixed = None if seed is None else [*overrides, *(key for key, _ in dotted(changes or {}))]
    _seed_sections(values, Recipe, values.get("seed", 0), fixed)
    source = " ".join((str(path), *(f"--set {override:.80}" for override in overrides)))
    _use_model_of_base(values, source)
    return _validated(values, source)


def _validated(values: dict[str, Any], source: str) -> Recipe:
    refuse_numbers(values, source)
    _remove_tables(values, Recipe)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain_mistakes(source, Recipe, error)) from None


def _find_recipe(name_or_path: str) -> Path:
    for path in (RECIPES / f"{name_or_path}.toml", Path(name_or_path)):
        with contextlib.suppress(OSError, ValueError):  # too long, or not encodable as a path
            if path.is_file():
                return path
    raise ConfigError(
        f"recipe {name_or_path[:200]!r} not found, wanted one of {recipe_names()} or the path of a TOML file"
    )


def is_reference(base_checkpoint: str) -> bool:
    """Whether a base checkpoint is given as an artifact, not as a directory."""
    return _REFERENCE.fullmatch(base_checkpoint) is not None


def base_directory(base_checkpoint: str) -> Path | None:
    """Directory of the base checkpoint that a recipe names. None: random weights."""
    if is_reference(base_checkpoint):
        settings = load_settings()
        artifacts = open_artifacts(settings)
        try:
            ref = artifacts.get(base_checkpoint)
        except ConfigError as error:
            raise ConfigError(
                f"base_checkpoint: {error}; `ostinato import` imports a model"
            ) from None
        return artifacts.local_copy(ref, settings.home)
    if "\0" in base_checkpoint:
        raise ConfigError(
            f"base_checkpoint {base_checkpoint!r:.200} has a null byte, wanted a path"
        )
    return (RECIPES.parents[1] / base_checkpoint).resolve() if base_checkpoint else None


def _use_model_of_base(values: dict[str, Any], source: str) -> None:
    """Sets the recipe's `[model]` to the shape of its base checkpoint. A `[model]` that differs from it raises
    ConfigError. Only a longer context is allowed: rotary positions extend to it, so a recipe may train it.
    """
    name = values.get("base_checkpoint", "")
    try:
        directory = base_directory(name) if isinstance(name, str) else None
    except ConfigError:
        if values.get("model"):  # the recipe gives the shape itself: only the run needs the weights
            return
        raise
    if directory is None or not isinstance(values.get("model", {}), dict):
        return
    file, is_there = directory / BASE_SPEC, False
    with contextlib.suppress(OSError):  # too long
        is_there = file.is_file()
    if not is_there:
        why = f"base_checkpoint {name!r:.200} has no {file!s:.300}, wanted a checkpoint directory"
        raise ConfigError(f"recipe {source}: {why}")
    spec = parse_json(str(file), read_bounded(file))
    if not isinstance(spec, dict):
        raise ConfigError(f"{file} holds a {type(spec).__name__}, wanted the shape of a model")
    given = values.get("model", {})
    longest, known = (shape.get("max_sequence_tokens") for shape in (given, spec))
    if isinstance(longest, int) and isinstance(known, int) and longest > known:
        spec["max_sequence_tokens"] = longest
    for key, value in given.items():
        if key in spec and value != spec[key]:
            raise ConfigError(
                f"recipe {source}: model.{key} = {value!r}, but {spec[key]!r} in {file}; leave [model] "
                'out to continue from the base checkpoint, or write base_checkpoint = "" to start from '
                "random weights of another shape"
            )
    values["model"] = {**given, **spec}


def _remove_tables(values: dict[str, Any], section: type[BaseModel]) -> None:
    """Replaces false in place of an optional table by None, because TOML has no null."""
    for name, field in section.model_fields.items():
        table, value = _table_of(field), values.get(name)
        # where false is a value of its own, it stays
        is_optional = field.default is None and Literal[False] not in typing.get_args(
            field.annotation
        )
        if table is not None and isinstance(value, dict):
            _remove_tables(value, table)
        elif table is not None and value is False and is_optional:
            values[name] = None


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a setting that is a table, also of an optional one."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _seed_sections(
    values: dict[str, Any],
    section: type[BaseModel],
    seed: Any,
    fixed: Sequence[str] | None,
    prefix: str = "",
) -> None:
    """Sets the `seed` of every section that has one to the recipe's."""
    for name, field in section.model_fields.items():
        inner = _table_of(field)
        if inner is None or not (name in values or _is_plain_default(field, inner)):
            continue
        table = values.setdefault(name, {})
        if not isinstance(table, dict):  # validation reports it
            continue
        if "seed" in inner.model_fields:
            is_fixed = any(item.startswith(f"{prefix}{name}.seed") for item in fixed or ())
            if fixed is None or is_fixed:
                table.setdefault("seed", seed)
            else:
                table["seed"] = seed
        _seed_sections(table, inner, seed, fixed, f"{prefix}{name}.")


def _is_plain_default(field: FieldInfo, inner: type[BaseModel]) -> bool:
    return isinstance(field.default, inner) and field.default == type(field.default)()


def _read_toml(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a file, merged over those of the recipe that it extends."""
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is not UTF-8: {error}") from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        raise ConfigError(f"recipe {path} is not TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    parent = values.pop("extends", None)
    if parent is None:
        return values
    chain = (*extended_by, path.resolve())
    inherited = _read_toml(_find_parent(path, parent, chain), chain)
    inherited.pop("serving", None)
    return _merged(inherited, values)


def parse_toml(text: str) -> dict[str, Any]:
    """The values of a text. ValueError when it is not TOML, or nested deeper than the parser can follow."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        deepest = max(text.splitlines(), key=lambda line: line.count("[") + line.count("{"))
        why = f"{deepest[:40]!r} is nested too deep, wanted at most {MAX_DEPTH} levels"
        raise ValueError(why) from None


def _find_parent(path: Path, name: str, chain: tuple[Path, ...]) -> Path:
    """The file of that name in the same folder, else the shipped recipe. A file never extends itself."""
    for folder in (path.parent, RECIPES):
        with contextlib.suppress(OSError, ValueError):  # too long, or not encodable as a path
            found = (folder / f"{name}.toml").resolve()
            if found.is_file() and found != path.resolve():
                if found in chain:
                    raise ConfigError(
                        f"recipe {path} extends {name!r} in a circle: {list(map(str, chain))}"
                    )
                return found
    raise ConfigError(
        f"recipe {path}: extends {name!r:.200}, wanted a recipe in the same folder or one of {recipe_names()}"
    )


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_tables else value
    return result


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.strip().split(".")):
        raise ConfigError(f"--set {override!r}: wanted section.key=value")
    try:
        (value,) = [None] if text == "null" else parse_toml(f"value = {text}").values()
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        if not _BARE_WORD.fullmatch(text):
            raise ConfigError(
                f"--set {key}: value {text[:200]!r} is not TOML ({error}); quote a string with spaces"
            ) from None
        value = text
    _set(values, key.strip(), value)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        table = values.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {name} is {table!r}, wanted a section")
        values = table
    values[last] = value
