"""Settings of this installation: directories, URLs, ports and limits of this machine.

Settings are locations and limits and are not part of an artifact's identity. Everything that changes results
belongs to the recipe.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ostinato.infra.platform.errors import ConfigError

PREFIX = "OSTINATO_"


class Settings(BaseSettings):
    """Settings of this installation. Each field is read from `OSTINATO_<FIELD>`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        validate_default=True,
    )

    home: Path = Field(
        default=Path(".ostinato"), description="folder of all data that this machine keeps"
    )
    object_store_url: str = Field(
        default_factory=lambda data: f"file://{quote(str(data['home']))}/objects"
    )
    """location of artifacts and weights: file:///absolute/path or s3://bucket/prefix"""
    ledger_url: SecretStr = Field(
        default_factory=lambda data: SecretStr(f"sqlite:///{data['home']}/ledger.db")
    )
    """URL of the ledger: sqlite:///path or postgresql://user:password@host/database; never shown"""
    cache_directory: Path = Field(default_factory=lambda data: data["home"] / "cache")
    """downloads that can be repeated: source archives, fetched artifacts"""
    s3_endpoint_url: str | None = None
    """S3 protocol server other than AWS; None: the AWS default"""
    s3_region: str | None = Field(
        default=None, description="region of the bucket; None: the AWS client's own choice"
    )
    s3_access_key_id: str | None = None
    """id of the access key; None: the AWS client's own chain of credentials"""
    s3_secret_access_key: SecretStr | None = None
    host: str = Field(default="127.0.0.1", description="address that services listen on")
    gateway_port: int = Field(default=8400, ge=1, le=65535)
    dashboard_port: int = Field(default=8401, ge=1, le=65535)
    prefect_port: int = Field(default=4200, ge=1, le=65535)
    cpu_limit: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """processor cores the project may keep busy on this machine"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device for training. auto: GPUs for models of at least 50 M parameters if every rank has one, else the
    CPU; cuda: GPUs; cpu: the GPUs of this machine are hidden from stages"""
    object_store_memory_bytes: int = Field(default=256 * 2**20, ge=80 * 2**20)
    """bytes of Ray's shared memory on this machine"""
    ray_address: str | None = None
    """HOST:PORT of the head of a Ray cluster that RL joins; None: Ray on this machine alone"""
    heartbeat_limit_seconds: float = Field(default=300.0, gt=0)
    """seconds without a heartbeat of its threads after which a stage is ended and resumed"""
    stall_limit_seconds: float = Field(default=3_600.0, gt=0)
    """seconds without progress after which a stage is ended and resumed"""
    upload_hours: float = Field(default=24.0, gt=0)
    """hours without use after which a repository that a tenant uploaded to the gateway is removed"""
    upload_bytes_per_tenant: int = Field(default=256 * 2**20, ge=0)
    """disk space for the uploaded repositories of one tenant; 0: uploads are refused"""
    trackers: Annotated[tuple[str, ...], NoDecode] = ()
    """comma-separated names of the trackers that also receive step metrics: tensorboard, wandb, mlflow,
    trackio, or one of an installed package"""
    minimum_free_disk_bytes: int = Field(
        default=4 * 2**30, ge=0, description="free disk space below which `ostinato doctor` warns"
    )

    @field_validator("home", "cache_directory")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        try:
            return path.expanduser().absolute()
        except RuntimeError as error:  # ~ of a user without a home folder
            raise ValueError(f"{error} Wanted a path without ~") from None

    @field_validator("home")
    @classmethod
    def _fits_in_urls(cls, home: Path) -> Path:
        # in the URLs of Prefect's database and of the ledger, ? ends a path and %41 is an A
        if "?" in str(home) or unquote(str(home)) != str(home):
            raise ValueError("wanted a path without ? and without % before two hexadecimal digits")
        str(home).encode()  # a ValueError for a name that is not UTF-8
        return home

    @field_validator("trackers", mode="before")
    @classmethod
    def _split(cls, names: object) -> object:
        return [name.strip() for name in names.split(",")] if isinstance(names, str) else names

    def to_environment(self) -> dict[str, str]:
        """The variables that make a child process load these same settings."""
        environment = {}
        for name, value in self:
            if value is not None:
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
                text = ",".join(value) if isinstance(value, tuple) else text
                environment[PREFIX + name.upper()] = text
        return environment


class Launch(BaseSettings):
    """Rank of this process among those that torchrun started, read from torchrun's environment variables."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int
    world_size: int
    local_world_size: int = Field(description="processes on this machine")
    master_addr: str = Field(description="host of torchrun's rendezvous store")
    master_port: int
    torchelastic_restart_count: int
    """number of times torchrun restarted all processes"""


def load_launch() -> Launch | None:
    """None when torchrun did not start this process."""
    return Launch() if "TORCHELASTIC_RUN_ID" in os.environ else None  # type: ignore[call-arg]


def named_secret(variable: str) -> str:
    """Value of an environment variable that the user named. ConfigError when it is not set."""
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(f"environment variable {variable} is not set, wanted a key in it")
    return value


def check_home(home: Path) -> None:
    """Raises ConfigError when the home is not a folder, or cannot be created or written."""
    place = next(path for path in (home, *home.parents) if path.exists() or path.is_symlink())
    why = "is not a folder"
    if place.is_dir():
        try:
            # permission bits do not show root that a file system is read-only
            with TemporaryFile(dir=place):
                return
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
    raise ConfigError(
        f"{PREFIX}HOME is {str(home)!r}: {place} {why}; wanted a folder of this user, for example "
        f"{PREFIX}HOME=~/.ostinato"
    )


def load_settings(**values: Any) -> Settings:
    """Reads the environment. `values`: settings that override it. ConfigError names variable, value seen and value wanted."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        variable = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
        raise ConfigError(f"{variable} is {first['input']!r}: {first['msg']}") from None
