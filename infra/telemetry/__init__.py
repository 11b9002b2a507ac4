"""Logs and metric files: what a running process tells about itself."""

from infra.telemetry.logs import configure_logging, fields
from infra.telemetry.metrics import MetricsLog, read_metrics

__all__ = ["MetricsLog", "configure_logging", "fields", "read_metrics"]
