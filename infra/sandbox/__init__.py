"""Boxes for agents' commands and for verdicts: no network, no host files, limits on everything."""

from ostinato.infra.sandbox.environment import RepositoryEnvironment
from ostinato.infra.sandbox.namespace import NamespaceSandbox
from ostinato.infra.sandbox.pool import SandboxPool
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
    "ExecResult", "Frame", "NamespaceSandbox", "PreparedRepository", "RepositoryEnvironment",
    "Sandbox", "SandboxLimits", "SandboxPool", "TestFailure", "TestOutcome", "TestProbe",
    "TestReport", "TestServer", "TextRegion", "VerdictCache", "fingerprint_files",
]  # fmt: skip
