"""`ostinato keys`: API keys of the gateway's tenants. A running gateway applies changes at its next request."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.flows.commands.answers import CommandResult, answering
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.settings import load_settings
from ostinato.infra.serving.gateway.config import (
    SIMULATED_TENANT,
    Caller,
    IssuedKey,
    RateLimitConfig,
)
from ostinato.infra.serving.gateway.issued_keys import IssuedKeys

keys = typer.Typer(no_args_is_help=True, help="API keys of the gateway's tenants.")
DEFAULT_RATE = RateLimitConfig()


@keys.command("add")
@answering
def add(
    tenant: Annotated[str, typer.Argument(help="tenant of the key; may have several keys")],
    consent: Annotated[
        bool, typer.Option(help="allows its interactions to be stored and trained on")
    ] = False,
    requests_per_minute: Annotated[
        float, typer.Option(min=0.001)
    ] = DEFAULT_RATE.requests_per_minute,
    burst_requests: Annotated[int, typer.Option(min=1)] = DEFAULT_RATE.burst_requests,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="tokens read and generated; no limit when absent")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="may read /metrics, which covers all tenants")
    ] = False,
) -> CommandResult:
    """Issues a key and prints it once. Only its digest is stored."""
    if tenant == SIMULATED_TENANT or not 0 < len(tenant.strip()) <= 80:
        raise ConfigError(
            f"tenant is {tenant!r}, wanted a name of 1 to 80 characters that is not "
            f"{SIMULATED_TENANT!r}"
        )
    caller = Caller(
        name=tenant.strip(),
        consent=consent,
        rate_limit=RateLimitConfig(
            requests_per_minute=requests_per_minute, burst_requests=burst_requests
        ),
        tokens_per_day=tokens_per_day,
        operator=operator,
    )
    key, text = IssuedKeys(load_settings().home).issue(caller, time.time())

    def show() -> None:
        typer.echo(f"key {key.key_id} of {key.name}, shown only once:", err=True)
        typer.echo(text)

    return CommandResult({**_public(key), "key": text}, show)


@keys.command("list")
@answering
def list_keys() -> CommandResult:
    """Lists all keys, oldest first, including revoked ones."""
    issued = IssuedKeys(load_settings().home).read()

    def show() -> None:
        console = Console()
        for key in issued:
            console.out(_line(key), highlight=False)
        if not issued:
            console.print("no key issued yet")

    return CommandResult([_public(key) for key in issued], show)


@keys.command("revoke")
@answering
def revoke(
    key_id: Annotated[str, typer.Argument(help="id of a key, from `ostinato keys list`")],
) -> CommandResult:
    """Revokes a key. The gateway refuses its next request and finishes answers in progress."""
    key = IssuedKeys(load_settings().home).revoke(key_id, time.time())
    return CommandResult(
        _public(key), lambda: typer.echo(f"key {key.key_id} of {key.name} is revoked")
    )


def _public(key: IssuedKey) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"digest"})


def _line(key: IssuedKey) -> str:
    issued = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d")
    budget = "no limit" if key.tokens_per_day is None else f"{key.tokens_per_day} tokens per day"
    marks = [
        *(["consent"] if key.consent else []),
        *(["operator"] if key.operator else []),
        *(["revoked"] if key.revoked_at is not None else []),
    ]
    rate = f"{key.rate_limit.requests_per_minute:g} requests per minute"
    return ", ".join([f"{key.key_id}  {key.name}  since {issued}", rate, budget, *marks])
