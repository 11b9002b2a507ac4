"""Settings of the gateway: who may call, how much, and what each answer may cost.

Plain values in, no behaviour.
"""

from pydantic import Field, SecretStr

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.record import Record


class RateLimitConfig(Record):
    """A token bucket: `burst_requests` at once, refilled at `requests_per_minute`."""

    requests_per_minute: float = Field(default=600.0, gt=0)
    burst_requests: int = Field(default=60, ge=1)


class TenantConfig(Record):
    """Someone who may call. Tenants are the populations that feedback baselines are kept for."""

    name: str = Field(min_length=1, max_length=80)
    api_keys: tuple[SecretStr, ...] = Field(
        min_length=1, description="any of them identifies the tenant"
    )
    consent: bool = Field(
        default=False,
        description=(
            "interactions may be stored and trained on; false: only counters are kept. A request "
            "may withdraw it"
        ),
    )
    rate_limit: RateLimitConfig = RateLimitConfig()


class GatewayConfig(Record):
    """One gateway process."""

    line: str = Field(min_length=1, description="serving line that interactions are recorded under")
    tenants: tuple[TenantConfig, ...] = Field(min_length=1)
    model_name: str = Field(
        default="ostinato", description="what /v1/models lists; arms are not shown to users"
    )
    harness: HarnessConfig = Field(
        default_factory=HarnessConfig, description="the same limits and tools as in training"
    )
    agent_temperature: float = Field(
        default=1.0, ge=0, description="of served agents; 1 keeps answers on-policy"
    )
    seed: int = Field(default=0, description="with the interaction's id, seeds its sampling")
    follow_up_context_tokens: int = Field(
        default=192,
        ge=1,
        description=(
            "a follow-up that would have fewer tokens left begins a new conversation with the "
            "first and the new message"
        ),
    )
    stream_slice_tokens: int = Field(
        default=8,
        ge=1,
        description="a streamed answer is generated and sent in slices of this many tokens",
    )
    max_sessions: int = Field(
        default=1_000, ge=1, description="conversations kept in memory; the oldest go first"
    )
    session_idle_seconds: float = Field(
        default=3_600.0, gt=0, description="an unused conversation is forgotten"
    )
    max_upload_files: int = Field(default=64, ge=0)
    max_upload_bytes: int = Field(
        default=1 << 20, ge=0, description="all files of a request together"
    )
    max_message_characters: int = Field(default=20_000, ge=1)
