"""Settings of the gateway: callers, their rates and budgets, and limits of each answer."""

from pydantic import Field, SecretStr

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.record import Record

LOCAL_KEYS_FILE = "gateway_keys.json"  # in the home: keys of this machine's own tenants
SIMULATED_TENANT = "simulated"  # keeps simulated traffic apart from users' traffic
MAX_SESSIONS = 1_000  # conversations kept in memory
MAX_TENANT_SESSIONS = 500  # per tenant, which loses its oldest first
SESSION_IDLE_SECONDS = 3_600.0  # a conversation idle for this long is forgotten
MAX_UPLOAD_FILES = 64  # per request
MAX_UPLOAD_BYTES = 1 << 20  # all files of a request together
MAX_MESSAGE_CHARACTERS = 20_000
MAX_MESSAGES = 512  # per chat
MAX_CHARACTERS_PER_TOKEN = 32  # longer text cannot fit the context, so it is not tokenised
MAX_FEEDBACK = 32  # signals per interaction


class RateLimitConfig(Record):
    """A token bucket: `burst_requests` at once, refilled at `requests_per_minute`."""

    requests_per_minute: float = Field(default=600.0, gt=0)
    burst_requests: int = Field(default=60, ge=1)


class Caller(Record):
    """A party that may call the API. Feedback baselines are kept per tenant."""

    name: str = Field(min_length=1, max_length=80, description="name of the tenant")
    consent: bool = False
    """permission to store interactions and train on them; without it only counters are kept. A request
    may withdraw it for itself"""
    rate_limit: RateLimitConfig = RateLimitConfig()
    tokens_per_day: int | None = Field(default=None, ge=1)
    """most tokens read and generated per day (UTC); None: no limit"""
    operator: bool = Field(
        default=False,
        description="permission to read /metrics, which shows the numbers of all tenants",
    )

    @property
    def account(self) -> str:
        """Name that requests and tokens are counted under."""
        return self.name

    def consents(self, store: bool | None) -> bool:
        """Whether the interaction of a request with this `store` may be stored."""
        return self.consent and store is not False


class TenantConfig(Caller):
    """A caller with keys from the settings."""

    api_keys: tuple[SecretStr, ...] = Field(min_length=1)
    """keys, each of which identifies the tenant"""


class IssuedKey(Caller):
    """One key that a command has issued. Its text is not stored."""

    key_id: str = Field(pattern=r"^[0-9a-f]{12}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key")
    created_at: float
    revoked_at: float | None = None

    @property
    def account(self) -> str:
        """The key's own account: each issued key has its own rate and budget."""
        return f"key {self.key_id}"


class GatewayConfig(Record):
    """Settings of one gateway process."""

    line: str = Field(min_length=1, description="serving line that interactions are recorded under")
    tenants: tuple[TenantConfig, ...] = Field(min_length=1)
    model_name: str = "ostinato"
    """name of the model in /v1/models; arms are not shown to users"""
    harness: HarnessConfig = Field(default_factory=HarnessConfig)
    """limits and tools, the same as in training"""
    agents_at_once: int = Field(default=16, ge=1)
    """most agents of one tenant that work or wait for a sandbox; more are refused"""
    follow_up_context_tokens: int = Field(default=192, ge=1)
    """tokens that a follow-up needs in the context; with fewer left it begins a new conversation with the
    first and the new message"""
    stream_slice_tokens: int = Field(default=8, ge=1)
    """tokens per slice in which a streamed answer is generated and sent"""
    ping_seconds: float = Field(default=10.0, gt=0, le=15)
    """silence of a stream after which a comment, or Anthropic's `ping`, is sent, since proxies end silent
    streams"""
