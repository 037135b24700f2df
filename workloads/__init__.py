"""What arrives: traces in columns, readers for public formats, generators."""

from workloads.trace import Trace, TraceError

__all__ = ["Trace", "TraceError"]
