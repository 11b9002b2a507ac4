"""Boxes for agents' commands and for verdicts: no network, no host files, limits on everything."""

from infra.sandbox.environment import RepositoryEnvironment, TextRegion, report_to_text
from infra.sandbox.namespace import NamespaceSandbox
from infra.sandbox.pool import SandboxPool
from infra.sandbox.protocol import (
    ExecResult,
    Frame,
    Sandbox,
    SandboxLimits,
    TestFailure,
    TestOutcome,
    TestReport,
)
from infra.sandbox.repository import PreparedRepository, fingerprint_files
from infra.sandbox.test_server import TestProbe, TestServer, VerdictCache

__all__ = [
    "ExecResult", "Frame", "NamespaceSandbox", "PreparedRepository", "RepositoryEnvironment",
    "Sandbox", "SandboxLimits", "SandboxPool", "TestFailure", "TestOutcome", "TestProbe",
    "TestReport", "TestServer", "TextRegion", "VerdictCache", "fingerprint_files",
    "report_to_text",
]  # fmt: skip
