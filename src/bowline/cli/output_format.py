"""The output formats that the command line offers."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OutputFormat"]


class OutputFormat(StrEnum):
    """How a report is written."""

    FULL = "full"
    CONCISE = "concise"
    JSON = "json"
    SARIF = "sarif"
    JSONL = "jsonl"
