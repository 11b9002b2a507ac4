"""Logs and metric files: what a running process tells about itself."""

from ostinato.infra.platform.telemetry.logs import configure_logging, fields, log_tail
from ostinato.infra.platform.telemetry.metrics import MetricsLog, read_lines, read_metrics

__all__ = ["MetricsLog", "configure_logging", "fields", "log_tail", "read_lines", "read_metrics"]
