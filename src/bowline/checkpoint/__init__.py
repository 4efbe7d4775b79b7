"""Checkpoints as bytes: one mapping, tensor name to extent, whatever the files and wherever they are. No torch.

`open_checkpoint` finds the files (`local`, `hub`), chooses those that hold the model (`weights`), parses their
headers strictly (`header`, `pickles`), and gives rows as numpy (`dtypes`).
"""

from bowline.checkpoint.checkpoint import Checkpoint, open_checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.lint import Lint, LintKind

__all__ = ["Checkpoint", "Lint", "LintKind", "StoredTensor", "open_checkpoint"]
