"""Requests and results of certifying a problem set."""

from enum import StrEnum

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.tasks.grading.adversary import Defence


class Reason(StrEnum):
    """Defect of a problem that a certificate names."""

    GOLD_FAILS = "gold_fails"  # a required test fails on the original, or is missing
    GOLD_UNPROVEN = "gold_unproven"  # its environment has no `solve`
    NO_TESTS = "no_tests"  # no test must pass, so nothing can be proven
    RIGHT_FIX_REFUSED = "right_fix_refused"  # a rewrite of the original is not rewarded
    READS_SOURCE = "reads_source"  # a test depends on the text of the source
    NOOP_PASSES = "noop_passes"  # the broken state is rewarded
    TEST_PASSES_BROKEN = "test_passes_broken"  # a fail_to_pass test passes in the broken state
    GUARD_FAILS_BROKEN = "guard_fails_broken"  # a pass_to_pass test fails in the broken state
    FLAKY = "flaky"  # outcomes differ between equal runs
    FLAKY_ORDER = "flaky_order"  # outcomes depend on the order of tests
    FLAKY_HASH = "flaky_hash"  # outcomes depend on the hash seed
    FLAKY_CLOCK = "flaky_clock"  # outcomes depend on date or time zone
    LEAK_PROMPT = "leak_prompt"  # the prompt contains the answer
    LEAK_FILE = "leak_file"  # a file that the agent can read contains the answer
    LEAK_HISTORY = "leak_history"  # an object of git contains the answer
    HACK_PAID = "hack_paid"  # an edit of the adversary suite is rewarded
    JUDGE_FAULT = "judge_fault"  # the judge raises on files that an attempt can leave
    RUNS_ON_HOST = "runs_on_host"  # the judge runs an attempt's files outside of a box
    NOT_JUDGED = "not_judged"  # a check ended with an error
    RIGHT_ANSWER_REFUSED = "right_answer_refused"  # a right final message is not rewarded


class Finding(Record):
    """One defect of one problem."""

    reason: Reason
    detail: str


class ProblemReport(Record):
    """Findings on one problem, and the times of its parts. A problem without findings is proven."""

    problem_id: str
    key: str
    """digest of the problem, the options and the checking code"""
    findings: tuple[Finding, ...]
    verdict_seconds: float | None = Field(description="median time of a test run; None: no run")
    step_seconds: float | None
    """time of one command in the box; None: not measured"""
    start_seconds: float | None
    """time until the box answers; None: not measured"""
    trial_seconds: float | None
    """median time of a verdict on a rewritten right fix; None: not measured"""
    hacks: dict[str, Defence] = Field(description="edit that fixes nothing -> refusing defence")
    fixes: dict[str, Defence] = Field(description="right fix -> refusing defence")
    checked_seconds: float = Field(description="wall time of all checks")


class CertifyOptions(Record):
    """Extent of the checks. The certificate contains it."""

    seed: int = Field(default=0, ge=0, description="seed of problems, orders and hacks")
    limit: int | None = Field(default=None, ge=1, description="problems drawn; None: all")
    repeats: int = Field(default=2, ge=1, description="rounds of runs that must agree")
    hacks: int = Field(default=5, ge=0)
    """hacks of the adversary suite per problem"""
    fixes: int = Field(default=1, ge=0, description="rewritten right fixes per problem")
    time_limit_seconds: float = Field(default=20.0, gt=0, description="time limit of one test run")


class Difficulty(Record):
    """Results of one checkpoint's attempts at the checked problems."""

    checkpoint: str
    attempts_per_problem: int
    solve_rate: float
    low: float
    high: float
    solved: dict[str, float] = Field(description="problem -> share of its attempts that passed")


class Certificate(Record):
    """Signed content: the problem set, the options, all reports, and totals."""

    schema_version: int = 2
    problem_set: str
    problems_sha256: str = Field(
        description="SHA-256 of the JSON lines of the checked problems, sorted"
    )
    num_problems: int = Field(description="problems of the whole set")
    version: str = Field(description="version of Ostinato")
    code_sha256: str = Field(description="SHA-256 of the checking code")
    options: CertifyOptions
    reports: tuple[ProblemReport, ...]
    counts: dict[str, int] = Field(description="reason -> number of problems")
    num_proven: int
    hacks_tried: int
    hacks_paid: int
    hacks: dict[str, dict[Defence, int]]
    """family of the adversary suite -> refusing defence -> number of hacks"""
    fixes_judged: int
    fixes_refused: int
    verdict_seconds: float | None = Field(description="median over problems")
    step_seconds: float | None = Field(description="median over problems")
    start_seconds: float | None = Field(description="median over problems")
    trial_seconds: float | None = Field(description="median over problems")
    difficulty: Difficulty | None = None
    created_at: float


class SignedCertificate(Record):
    """A certificate with its signature."""

    certificate: Certificate
    algorithm: str = "ed25519"
    public_key: str = Field(description="hex of 32 bytes")
    signature: str = Field(description="hex, over the certificate as canonical JSON")
