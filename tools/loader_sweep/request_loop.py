"""What the processes of all loaders do: read a request a line, answer one a line, and let nothing else be printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["serve"]


def serve(version: str, fate_of: Callable[[Path, str, str], tuple[str, str]]) -> None:
    """Answer each request of the standard input: `directory`, `head` and `embedding` (tensor names).

    The first line says `version`. Each further line is an answer: `fate`, and in `why` the loader's words where it
    refuses. What a loader itself prints, from C too, goes nowhere.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        fate, why = fate_of(Path(request["directory"]), request["head"], request["embedding"])
        print(json.dumps({"fate": fate, "why": why}), file=answers, flush=True)
