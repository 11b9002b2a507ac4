"""Records that stages pass to one another. They are frozen: later stages do not change them."""

import base64
from collections.abc import Mapping
from enum import StrEnum

from pydantic import ConfigDict, Field, model_validator

from ostinato.infra.agent.environment import HarnessState
from ostinato.infra.agent.transcript import Segment, Transcript
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record, Share
from ostinato.infra.sandbox.egress.config import NetworkRequest

REFACTORING = "refactoring"  # kind of the problems that also forbid the old name


class StageRecord(Record):
    """Base of records that stages pass to one another."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    schema_version: int = 1


class Split(StrEnum):
    """Permitted use of a problem. Each problem has exactly one."""

    TRAIN = "train"  # RL prompts
    DEMONSTRATION = "demonstration"  # SFT transcripts
    HELD_OUT = "held_out"  # evaluation: this mutation is never trained on, its function may be
    HELD_OUT_FUNCTION = "held_out_function"  # evaluation: its function is never trained on
    USER = "user"  # requests of simulated users


class LineEdit(StageRecord):
    """One changed line, which breaks the problem's code."""

    path: str
    line_number: int = Field(description="1-based in the file")
    gold_text: str
    broken_text: str


class BlockEdit(StageRecord):
    """Consecutive lines replaced by other lines, usually fewer."""

    path: str
    first_line: int = Field(description="1-based in the pristine file")
    gold_lines: tuple[str, ...]
    broken_lines: tuple[str, ...]


class OracleCall(StageRecord):
    """One call and the original code's result, both in the format of infra/sandbox/function_calls.py."""

    arguments: str
    result: str


class FunctionOracle(StageRecord):
    """Input-output behaviour of a function."""

    path: str
    symbol: str
    visible: tuple[OracleCall, ...] = Field(description="calls of the tests; agents may see them")
    held_out: tuple[OracleCall, ...] = Field(description="derived calls; no agent sees them")


class CodePlace(StageRecord):
    """Lines of a file."""

    path: str
    first_line: int = Field(ge=1, description="1-based in the pristine file")
    last_line: int

    def __str__(self) -> str:
        last = f"-{self.last_line}" if self.last_line > self.first_line else ""
        return f"{self.path}:{self.first_line}{last}"


class WantedReply(StageRecord):
    """Final message that solves a problem in which no file may change."""

    places: tuple[CodePlace, ...] = ()
    """places that answer the question; empty: the message must say that nothing is wrong"""
    needs_all: bool = False
    """true: the answer is all places together; false: any one of them"""


class Problem(StageRecord):
    """One validated RL problem: the prepared repository with `edits` and `blocks` applied."""

    problem_id: str
    repository: str = Field(description="name of the prepared repository")
    repository_fingerprint: str
    kind: str = Field(description="mutation, or a kind of a problem set")
    operator: str = Field(default="", description="mutation operator that made it")
    path: str = Field(default="", description="the edited file, relative to the repository")
    symbol: str = Field(default="", description="the function or method that holds the edit")
    first_line: int = Field(default=1, description="first line of the symbol in the file, 1-based")
    last_line: int = 1
    prompt: str = Field(description="request of the user, short and underspecified")
    edits: tuple[LineEdit, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    """test ids that fail with the broken code and pass with the original"""
    pass_to_pass: tuple[str, ...] = ()
    """test ids that pass with both"""
    split: Split
    solve_rate: Share | None = None
    """share of a checkpoint's attempts that solved it, for the problems of an RL run with probes; None: not
    probed. None in every stored set, since sets are independent of checkpoints"""
    blocks: tuple[BlockEdit, ...] = ()
    """edits of several lines, not overlapping; in pristine coordinates"""
    cut_tests: tuple[BlockEdit, ...] = ()
    """hidden tests, which are removed from the agent's repository; of a refactoring: tests that use the old name"""
    hidden_tests: tuple[str, ...] = ()
    """tests of fail_to_pass that decide the verdict and that no agent sees"""
    question_warranted: bool = False
    """true: the prompt lacks something that only the user knows, so a question is right"""
    oracle: FunctionOracle | None = None
    """calls of the function in `path`, with the original's results; None: there are none"""
    environment: str = ""
    """environment that judges attempts; empty: the repository's tests judge"""
    given_files: dict[str, str] = Field(default={})
    """files of an environment, by path, that replace or extend those of the repository"""
    facts: dict[str, str] = Field(default={})
    """facts that only the judge knows; of a refactoring: old_path and old_name of its symbol; of a question: what its
    answer is derived from"""
    reply: WantedReply | None = Field(default=None, exclude_if=lambda reply: reply is None)
    """final message that solves the problem, which no agent sees; None: the changed files are judged"""
    prompt_level: str = Field(default="", exclude_if=lambda level: not level)
    """wording of the prompt, such as vague; empty: a set that does not record it, or another collection's text"""

    @property
    def visible_tests(self) -> tuple[str, ...]:
        """Tests that an agent may run."""
        hidden = frozenset(self.hidden_tests)
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return tuple(test for test in tests if test not in hidden)

    @property
    def old_place(self) -> tuple[str, str] | None:
        """Path and name of a refactoring's symbol in the broken state. None: it is no refactoring."""
        if self.kind != REFACTORING:
            return None
        return self.facts["old_path"], self.facts["old_name"]

    @property
    def num_changed_lines(self) -> int:
        """Lines of product code that differ between the broken and the original state."""
        return len(self.edits) + sum(
            max(len(block.gold_lines), len(block.broken_lines)) for block in self.blocks
        )

    def break_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The changed files as the agent finds them: with broken code and without hidden tests."""
        lines_by_path: dict[str, list[str]] = {}
        if self.reply is not None and not self.reply.places:
            # written anew, as broken files are, so that its time of change does not tell that it is right
            lines_by_path[self.path] = files[self.path].decode().split("\n")
        for edit in self.edits:
            lines = lines_by_path.setdefault(edit.path, files[edit.path].decode().split("\n"))
            seen = lines[edit.line_number - 1 : edit.line_number]
            if seen != [edit.gold_text]:
                raise ProblemError(
                    f"problem {self.problem_id}: {edit.path}:{edit.line_number} is {seen}, wanted "
                    f"{edit.gold_text!r}"
                )
            lines[edit.line_number - 1] = edit.broken_text
        blocks = (*self.blocks, *self.cut_tests)
        # from the last line up, so that earlier line numbers stay valid
        for block in sorted(blocks, key=lambda block: (block.path, -block.first_line)):
            lines = lines_by_path.setdefault(block.path, files[block.path].decode().split("\n"))
            start, end = block.first_line - 1, block.first_line - 1 + len(block.gold_lines)
            if tuple(lines[start:end]) != block.gold_lines:
                raise ProblemError(
                    f"problem {self.problem_id}: {block.path}:{block.first_line} is "
                    f"{lines[start:end]!r}, wanted {list(block.gold_lines)!r}"
                )
            lines[start:end] = block.broken_lines
        broken = {path: "\n".join(lines).encode() for path, lines in lines_by_path.items()}
        return broken | {path: text.encode() for path, text in self.given_files.items()}


class Outcome(StrEnum):
    """End of a dispatched trajectory. Each trajectory has exactly one."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    BROKEN = "broken"
    TIMED_OUT = "timed_out"
    SANDBOX_FAILED = "sandbox_failed"
    ENGINE_FAILED = "engine_failed"
    STALE = "stale"


class Verdict(StageRecord):
    """Result of the grading tests on the final state of the repository."""

    problem_id: str
    passed: bool
    tests_required: int
    tests_passed: int
    outcomes: dict[str, str]
    """test id -> passed, failed, error, timeout, missing"""
    detail: str = ""
    wall_seconds: float = 0.0
    tampering: tuple[str, ...] = ()
    """signs of manipulation of the test run; any of them voids the verdict"""
    ignored_paths: tuple[str, ...] = ()
    """changed files that grading ignores: tests, settings of the test runner"""
    harms: dict[str, str] = Field(default={})
    """harm that the change does although the tests pass -> where"""


class RewardReport(StageRecord):
    """A reward and its terms. Each term is a measured value times a signed weight. `total` is the sum of `terms` in
    their order.
    """

    total: float
    terms: dict[str, float] = Field(description="name -> value times weight")
    values: dict[str, float] = Field(default_factory=dict)
    """name -> measured value; empty in older reports"""
    weights: dict[str, float] = Field(default_factory=dict)
    """name -> signed weight; negative: a penalty"""
    flags: dict[str, str] = Field(default_factory=dict)
    """pattern of a hack monitor -> its evidence"""
    segments: tuple[float, ...] = ()
    """reward of each segment of the transcript minus `total`, if an installed term rewards segments; empty: all
    segments share `total`"""

    def of_segment(self, number: int) -> float:
        """Reward of a segment minus `total`."""
        return self.segments[number] if self.segments else 0.0

    @model_validator(mode="after")
    def _adds_up(self) -> "RewardReport":
        if self.values.keys() != self.weights.keys() or (
            self.values and self.values.keys() != self.terms.keys()
        ):
            raise ValueError(
                f"reward report: terms {sorted(self.terms)}, values {sorted(self.values)} and "
                f"weights {sorted(self.weights)}, wanted the same names"
            )
        if abs(self.total - sum(self.terms.values())) > 1e-9 * max(1.0, abs(self.total)):
            raise ValueError(
                f"reward report: total is {self.total}, wanted {sum(self.terms.values())}, "
                "the sum of its terms"
            )
        return self


class Branch(StageRecord):
    """Point of an attempt from which other attempts of its group continue, or from which it continues itself."""

    turns: int = Field(description="turns before it; all of them if no attempt continues from it")
    files: dict[str, str | None] = Field(default_factory=dict)
    """files that differ from the repository's, in base64; None: removed"""
    state: HarnessState | None = None
    """memory of the harness; None in attempts that continue from the branch"""

    def contents(self) -> dict[str, bytes | None]:
        """Decoded `files`."""
        return {
            path: None if text is None else base64.b64decode(text)
            for path, text in self.files.items()
        }


class Trajectory(StageRecord):
    """One whole attempt at a problem, graded."""

    trajectory_id: str
    group_id: str
    problem_id: str
    attempt: int
    seed: int
    outcome: Outcome
    reason: str
    verdict: Verdict | None
    """verdict of the grader; None only if infrastructure failed before grading"""
    reward: RewardReport
    transcript: Transcript
    changed_files: dict[str, str] = Field(default_factory=dict)
    branch: Branch | None = None
    """branch in a forked group; tokens before it are context and are not trained"""
    network: tuple[NetworkRequest, ...] = ()
    """requests of the attempt's box to the network, in the order in which they ended"""
    started_at: float
    finished_at: float

    @model_validator(mode="after")
    def _one_reward_per_segment(self) -> "Trajectory":
        rewarded, made = len(self.reward.segments), len(self.transcript.segments)
        if rewarded not in (0, made):
            raise ValueError(
                f"{self.trajectory_id}: {rewarded} rewards of segments, wanted none or {made}"
            )
        return self

    @property
    def is_solved(self) -> bool:
        """Whether it was graded and passed."""
        return self.verdict is not None and self.verdict.passed

    @property
    def is_fault(self) -> bool:
        """Whether it failed by an unknown exception."""
        signs = () if self.verdict is None else self.verdict.tampering
        return any(sign.startswith("fault") for sign in signs)

    @property
    def is_context_only(self) -> bool:
        """Whether it was started for others to continue from, and none did."""
        return self.branch is not None and self.branch.turns >= len(self.transcript.turns)


class Group(StageRecord):
    """Attempts at one problem whose rewards are centred on their mean."""

    group_id: str
    problem_id: str
    trajectories: tuple[Trajectory, ...]


class Hint(StageRecord):
    """Context of one turn with a hint added."""

    turn_start: int = Field(description="first token of the turn in the sample's segment")
    turn_end: int = Field(description="index after the turn's last token")
    context_tokens: tuple[int, ...] = Field(description="tokens before the turn, and the hint")


class Sample(StageRecord):
    """One trainable sequence with its advantage."""

    sample_id: str
    trajectory_id: str
    group_id: str = ""
    """group on whose mean the reward was centred; empty: a baseline was subtracted"""
    segment: Segment
    advantage: float
    reward: float
    segment_reward: float = Field(default=0.0, description="reward of the segment minus `reward`")
    hint: Hint | None = Field(default=None, description="hint that the objective distils, if any")


class Metric(StageRecord):
    """A mean over problems with its confidence interval."""

    mean: float
    low: float
    high: float
    confidence: float = 0.90
    count: int


class ProblemScore(StageRecord):
    """All attempts of one checkpoint at one problem."""

    problem_id: str
    attempts: int
    solved: int
    mean_generated_tokens: float
    mean_turns: float
    mean_tool_calls: float
    broken_calls: int


class AttemptMeans(StageRecord):
    """Means over attempts. None: no attempt has the value."""

    attempts: int
    seconds: float | None = Field(description="seconds from the request for a box to the verdict")
    generated_tokens: float
    prompt_tokens: float | None = Field(
        description="tokens of prompts and tool results, counted once in each segment"
    )
    tool_calls: float
    changed_lines: float | None = Field(
        description="lines of product files that the attempt changed; a replaced line counts once"
    )
    reference_lines: float | None = Field(
        description="lines that the reference solution changes, counted as `changed_lines`"
    )
    turns: float | None = Field(default=None, description="answers of the model")


class SliceScore(StageRecord):
    """Results on the problems of one slice of a suite. A problem may be in several slices."""

    average: Metric = Field(description="mean solve rate of single attempts")
    best_of: Metric = Field(description="share of problems solved by at least one attempt")
    all_of: Metric = Field(description="share of problems solved by every attempt, pass^k")
    attempt_means: AttemptMeans | None = Field(description="means over all attempts")
    problem_ids: tuple[str, ...]


class Scorecard(StageRecord):
    """Results of a checkpoint on a suite."""

    scorecard_id: str
    suite: str
    checkpoint: str
    attempts_per_problem: int
    temperature: float
    average: Metric = Field(description="mean solve rate of single attempts")
    best_of: Metric = Field(description="share of problems solved by at least one attempt")
    generated_tokens: Metric
    turns: Metric
    tool_calls: Metric
    broken_call_ratio: float
    first_edit_ratio: float | None = None
    """share of attempts that their first edit solved (0..1)"""
    cut_ratio: float | None = None
    """share of attempts that ended at a limit or made the same edit twice (0..1)"""
    attempt_means: AttemptMeans | None = None
    """means over all attempts"""
    solved_attempt_means: AttemptMeans | None = None
    """means over the solved attempts; None: no attempt was solved, or the scorecard is older than this field"""
    problems: tuple[ProblemScore, ...]
    all_of: Metric | None = None
    """share of problems solved by every attempt, pass^k; None: the scorecard is older than this field"""
    slices: dict[str, SliceScore] = Field(default={})
    """results by slice of the suite; empty: the problems are a split, not a suite"""


class GateCheck(StageRecord):
    """One rule of a gate with the measured value and its threshold."""

    name: str
    value: float | None = Field(description="measured value; None: it is not a number")
    threshold: float
    passed: bool
    detail: str


class GateDecision(StageRecord):
    """Decision on a candidate, with its reason."""

    gate_id: str
    candidate: str = Field(description="checkpoint name")
    candidate_scorecard_id: str
    champion: str | None = Field(description="checkpoint name; None: there was no champion")
    champion_scorecard_id: str | None
    passed: bool
    difference: Metric
    """candidate minus champion; without a champion the candidate's average"""
    checks: tuple[GateCheck, ...]
    reason: str
