"""Changes of a checkpoint where it lies, without building the model: tie, untie, resize, prune, merge, cast, undo.

An edit is a chain of `steps`. Each makes a new `draft` of a draft: what every tensor consists of (`content`), and what
the small files say. The `plan` says what becomes of each file. `commit` writes it beside the checkpoint, reads it again
(`verification`), and puts it in place in one step of the file system; `history` brings the old bytes back. Nothing here
imports torch, and memory does not grow with the model.
"""

from bowline.edit.adapter.extraction import ExtractionReport, extract_adapter
from bowline.edit.checkpoint_edit import CheckpointEdit, EditableCheckpoint, open_checkpoint
from bowline.edit.commit import EditReport
from bowline.edit.history import forget, history, undo
from bowline.edit.plan import EditPlan

__all__ = [
    "CheckpointEdit",
    "EditReport",
    "EditableCheckpoint",
    "EditPlan",
    "ExtractionReport",
    "extract_adapter",
    "forget",
    "history",
    "open_checkpoint",
    "undo",
]
