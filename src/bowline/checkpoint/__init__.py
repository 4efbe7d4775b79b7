"""Reads and writes checkpoints as files, without torch.

`open_checkpoint` finds the files (`places`), chooses those that hold the model (`weights`), parses their headers
strictly (`formats`), and maps each tensor name to its place in a file. Rows come as numpy arrays. `durable` writes
files and directories that survive a crash.
"""

from bowline.checkpoint.checkpoint import Checkpoint, checkpoints_at, find_checkpoints, open_checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.lint import Lint, LintKind

__all__ = [
    "Checkpoint",
    "Lint",
    "LintKind",
    "StoredTensor",
    "checkpoints_at",
    "find_checkpoints",
    "open_checkpoint",
]
