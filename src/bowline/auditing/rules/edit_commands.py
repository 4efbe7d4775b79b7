"""The command lines that mend a finding in the checkpoint's bytes, as the help of an observation."""

from __future__ import annotations

import os

from bowline.auditing.evidence import Evidence
from bowline.wording import shell_word

__all__ = ["edit_command"]


def edit_command(evidence: Evidence, verb: str, *options: str) -> str | None:
    """The command that edits this checkpoint in place; `None` for one that is not a directory of this machine.

    Example: "`bowline tie outputs/model --in-place --keep embedding`".
    """
    if evidence.gguf_file or evidence.graph_file or not os.path.isdir(evidence.location):  # noqa: PTH112 - can raise
        return None
    return f"`bowline {verb} {shell_word(evidence.location)} --in-place{''.join(f' {option}' for option in options)}`"
