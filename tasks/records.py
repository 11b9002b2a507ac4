"""The records that stages hand to one another: frozen, made by one stage and never changed by the next."""

import base64
from collections.abc import Mapping
from enum import StrEnum

from pydantic import (
    ConfigDict,
    Field,
    model_validator,
)

from ostinato.infra.agent.environment import HarnessState
from ostinato.infra.agent.transcript import Segment, Transcript
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.record import Record


class StageRecord(Record):
    """Base of what stages hand to one another."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    schema_version: int = 1


class Split(StrEnum):
    """Permitted use of a problem. Exactly one each."""

    TRAIN = "train"  # RL prompts
    DEMONSTRATION = "demonstration"  # SFT transcripts are made from these
    HELD_OUT = "held_out"  # evaluation: this mutation is never trained on, its function may be
    # evaluation: no problem of this function is ever trained on
    HELD_OUT_FUNCTION = "held_out_function"
    USER = "user"  # what simulated users bring to the gateway


class LineEdit(StageRecord):
    """One changed line. The problem is broken with it and whole without."""

    path: str
    line_number: int = Field(description="1-based in the file")
    gold_text: str
    broken_text: str


class BlockEdit(StageRecord):
    """Consecutive lines replaced by others, usually by fewer."""

    path: str
    first_line: int = Field(description="1-based in the pristine file")
    gold_lines: tuple[str, ...]
    broken_lines: tuple[str, ...]


class OracleCall(StageRecord):
    """One call with the original's result. Both in the form of infra/sandbox/function_calls.py."""

    arguments: str
    result: str


class FunctionOracle(StageRecord):
    """Input-output behaviour of a function."""

    path: str
    symbol: str
    visible: tuple[OracleCall, ...] = Field(description="made by the tests; may be shown")
    held_out: tuple[OracleCall, ...] = Field(description="derived; never shown")


class Problem(StageRecord):
    """One proven RL problem: the prepared repository with `edits` and `blocks` applied."""

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
    """test ids that fail when broken and pass when whole"""
    pass_to_pass: tuple[str, ...] = ()
    """test ids that pass in both states"""
    split: Split
    solve_rate: None = None
    """never measured; stands in the lines of the shipped set, whose checksum covers it"""
    blocks: tuple[BlockEdit, ...] = ()
    """edits of several lines, not overlapping; in pristine coordinates"""
    cut_tests: tuple[BlockEdit, ...] = ()
    """hidden tests taken out of what the agent sees"""
    hidden_tests: tuple[str, ...] = ()
    """tests of fail_to_pass that judge, never shown"""
    question_warranted: bool = False
    """the prompt leaves open what only the user can tell, so asking is right"""
    oracle: FunctionOracle | None = None
    """calls of the function in `path` that no test makes, with the original's results; None: it has
    none"""
    environment: str = ""
    """judge of an attempt; empty: the tests of the repository"""
    given_files: dict[str, str] = Field(default={})
    """an environment's files laid over the repository, by path"""
    facts: dict[str, str] = Field(default={})
    """facts that only the judge of the environment knows"""

    @property
    def visible_tests(self) -> tuple[str, ...]:
        """The tests an agent may run."""
        hidden = frozenset(self.hidden_tests)
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return tuple(test for test in tests if test not in hidden)

    @property
    def num_changed_lines(self) -> int:
        """Lines of product code that differ between broken and whole."""
        return len(self.edits) + sum(
            max(len(block.gold_lines), len(block.broken_lines)) for block in self.blocks
        )

    def break_files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The changed files as the agent finds them: broken code, hidden tests cut out."""
        lines_by_path: dict[str, list[str]] = {}
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
        # from the last line up, so that the numbers of those before stay right
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
    """End of a dispatched trajectory. Exactly one each."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    BROKEN = "broken"
    TIMED_OUT = "timed_out"
    SANDBOX_FAILED = "sandbox_failed"
    ENGINE_FAILED = "engine_failed"
    STALE = "stale"


class Verdict(StageRecord):
    """Outcome of the graded tests on the final state of the repository."""

    problem_id: str
    passed: bool
    tests_required: int
    tests_passed: int
    outcomes: dict[str, str]
    """test id -> passed, failed, error, timeout, missing"""
    detail: str = ""
    wall_seconds: float = 0.0
    tampering: tuple[str, ...] = ()
    """signs that the run was not honest; any voids the verdict"""
    ignored_paths: tuple[str, ...] = ()
    """changed files that count for nothing: tests, runner settings"""
    harms: dict[str, str] = Field(default={})
    """things that a change spoils though the tests pass -> where"""


class RewardReport(StageRecord):
    """The reward with each term shown: a measured value times a signed weight.

    `total` is the sum of `terms` in the order they stand in.
    """

    total: float
    terms: dict[str, float] = Field(description="name -> value times weight")
    values: dict[str, float] = Field(default_factory=dict)
    """name -> what was measured; empty in older reports"""
    weights: dict[str, float] = Field(default_factory=dict)
    """name -> signed weight; negative: taken off"""
    flags: dict[str, str] = Field(default_factory=dict)
    """pattern of a hack monitor -> its evidence"""

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
    """Point of an attempt that others of its group continue from, or that it continued from."""

    turns: int = Field(description="answers before it; all of an attempt's: nothing branched off")
    files: dict[str, str | None] = Field(default_factory=dict)
    """files that differed from the repository's, in base64; None: removed"""
    state: HarnessState | None = None
    """memory of the harness; None in those that continue"""

    def contents(self) -> dict[str, bytes | None]:
        """The files that differed."""
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
    """verdict of the grader; None only when infrastructure failed before grading"""
    reward: RewardReport
    transcript: Transcript
    changed_files: dict[str, str] = Field(default_factory=dict)
    branch: Branch | None = None
    """point of a forked group: tokens before it are context and are not trained"""
    started_at: float
    finished_at: float

    @property
    def is_fault(self) -> bool:
        """Whether it failed by an exception that nothing knows."""
        signs = () if self.verdict is None else self.verdict.tampering
        return any(sign.startswith("fault") for sign in signs)

    @property
    def is_context_only(self) -> bool:
        """Whether it was begun for others to branch off and none did."""
        return self.branch is not None and self.branch.turns >= len(self.transcript.turns)


class Group(StageRecord):
    """The attempts at one problem whose rewards are centred on one another."""

    group_id: str
    problem_id: str
    trajectories: tuple[Trajectory, ...]


class Hint(StageRecord):
    """Context of one turn as the same policy reads it after a hint."""

    turn_start: int = Field(description="first token of the turn in the sample's segment")
    turn_end: int = Field(description="after its last token")
    context_tokens: tuple[int, ...] = Field(description="all before the turn, the hint in it")


class Sample(StageRecord):
    """One trainable sequence with its advantage."""

    sample_id: str
    trajectory_id: str
    group_id: str = ""
    """group whose mean the reward was centred on; empty: a baseline's"""
    segment: Segment
    advantage: float
    reward: float
    hint: Hint | None = Field(default=None, description="hint, where the objective distils one")


class Metric(StageRecord):
    """A mean with its interval over problems."""

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
    """Means over attempts. None: no attempt has the figure."""

    attempts: int
    seconds: float | None = Field(description="seconds from asking for a box to the verdict")
    generated_tokens: float
    prompt_tokens: float | None = Field(
        description="read and not sampled: prompts and results of tools, once in each segment"
    )
    tool_calls: float
    changed_lines: float | None = Field(
        description="lines of product files, from the state given to the state left; a line that was replaced counts once"
    )
    reference_lines: float | None = Field(
        description="lines that the reference solution changes, counted as `changed_lines`"
    )


class Scorecard(StageRecord):
    """A checkpoint on a suite."""

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
    """share of attempts that ended at a limit or wrote the same edit twice (0..1)"""
    attempt_means: AttemptMeans | None = None
    """means over all attempts"""
    solved_attempt_means: AttemptMeans | None = None
    """means of the solved attempts alone; None: there are none, or older than the figures"""
    problems: tuple[ProblemScore, ...]


class GateCheck(StageRecord):
    """One rule of a gate with the number seen and the number wanted."""

    name: str
    value: float | None = Field(description="None: what was measured is not a number")
    threshold: float
    passed: bool
    detail: str


class GateDecision(StageRecord):
    """Decision on a candidate, with its reason."""

    gate_id: str
    candidate: str = Field(description="checkpoint name")
    candidate_scorecard_id: str
    champion: str | None = Field(description="None: there was no champion to compare with")
    champion_scorecard_id: str | None
    passed: bool
    difference: Metric
    """candidate minus champion; the candidate's own average without one"""
    checks: tuple[GateCheck, ...]
    reason: str
