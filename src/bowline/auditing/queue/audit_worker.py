"""A process that audits the places it is sent, each in a child of its own: `python -m ...audit_worker OPTIONS`.

It reads one JSON text a line, a path, and writes one JSON object a line: `{"code": N, "record": {...}}`, or
`{"died": "how"}` if the child ended without a result.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from typing import Any

from bowline.auditing.audit_report import AuditReport
from bowline.auditing.place_audit import audit_place
from bowline.auditing.report.audit_run import AuditFailure, Run
from bowline.auditing.report.json_format import record_of
from bowline.errors import BowlineError
from bowline.families.transformers_table import load_table

__all__ = ["result_of"]

PRELOADED = (
    "bowline.auditing.adapter_audit",
    "bowline.auditing.alike_rows",
    "bowline.auditing.odd_norms",
    "bowline.auditing.quantised_comparison",
    "bowline.auditing.row_scan",
    "bowline.auditing.special_ids",
    "bowline.auditing.vocabulary_tables",
    "bowline.checkpoint.formats.quantised",
    "bowline.geometry.diagnostics",
    "bowline.recipes.catalogue",
    "concurrent.futures.thread",
    "numpy.ma",
)
"""Modules that an audit imports only when it needs them. They are imported here once, and not in each child."""

LOOKS_UP = 1.0
"""Seconds after which it looks whether its caller is still there."""


def result_of(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """The exit code of one audit, and its record for the line of results.

    Example:
        >>> result_of("/no/such/place", {})["code"]
        2
    """
    try:
        report = audit_place(path, **options)
    except BowlineError as error:
        run = Run(reports=(), failures=(AuditFailure(path=path, message=error.message, help=error.help),))
    else:
        run = Run(reports=(report,)) if isinstance(report, AuditReport) else Run(reports=(), adapters=(report,))
    return {"code": run.exit_code, "record": record_of(run)}


def main() -> None:
    """Read paths until there are no more."""
    options = json.loads(sys.argv[1])
    caller = os.getppid()
    for name in PRELOADED:
        importlib.import_module(name)
    load_table()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin.buffer:
        path = json.loads(line)
        if not hasattr(os, "fork"):
            answers.write(_line(result_of(path, options)))
            answers.flush()
            continue
        ended, open_while_alive = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ended)
            answers.write(_line(result_of(path, options)))
            answers.flush()
            os._exit(0)
        os.close(open_while_alive)
        while not select.select([ended], [], [], LOOKS_UP)[0]:
            if os.getppid() != caller:  # nobody waits for the answer, and perhaps it never comes
                os.kill(child, signal.SIGKILL)
                return
        os.close(ended)
        _, status = os.waitpid(child, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            answers.write(b"\n" + _line({"died": how}))
            answers.flush()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode() + b"\n"


if __name__ == "__main__":
    main()
