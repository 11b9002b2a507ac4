"""Boxes for agents' commands and for verdicts: no network, no host files, limits on everything."""

from ostinato.infra.sandbox.backends import SandboxKind, open_backend
from ostinato.infra.sandbox.environment import RepositoryEnvironment, open_box
from ostinato.infra.sandbox.protocol import (
    ExecResult,
    Frame,
    Sandbox,
    SandboxLimits,
    TestFailure,
    TestOutcome,
    TestReport,
)
from ostinato.infra.sandbox.repository import PreparedRepository, fingerprint_files
from ostinato.infra.sandbox.test_server import TestProbe, TestServer, VerdictCache

__all__ = [
    "ExecResult", "Frame", "PreparedRepository", "RepositoryEnvironment", "Sandbox", "SandboxKind",
    "SandboxLimits", "TestFailure", "TestOutcome", "TestProbe", "TestReport", "TestServer",
    "VerdictCache", "fingerprint_files", "open_backend", "open_box",
]  # fmt: skip
