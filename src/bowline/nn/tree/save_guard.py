"""Has transformers' `save_pretrained` raise for a model with a quantised table, which `from_pretrained` cannot read."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from bowline.errors import CheckpointError

__all__ = ["UnsavedByTransformers", "guard_saves"]

METHOD = "save_pretrained"


def guard_saves(model: nn.Module, kind: type[nn.Module]) -> None:
    """Shadow `save_pretrained` of each transformers model that holds a module of `kind`; uncover it in the others.

    It then raises before it writes anything, whatever state it is given. As a bound method, which a copy of the model
    binds to itself. For a model around this one, or one out of a pickle, the table asks `transformers_is_saving`.
    """
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    for module in model.modules() if transformers is not None else ():
        if isinstance(module, transformers.PreTrainedModel):
            if any(isinstance(part, kind) for part in module.modules()):
                module.__dict__[METHOD] = MethodType(save_pretrained, module)
            elif getattr(module.__dict__.get(METHOD), "__func__", None) is save_pretrained:
                del module.__dict__[METHOD]


def save_pretrained(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
    """Raise, in place of transformers' method. It has that method's name, by which a pickle finds it again."""
    refuse_to_save()


def refuse_to_save() -> NoReturn:
    """Raise the `CheckpointError` of `save_pretrained` on a model with a quantised table."""
    raise CheckpointError(
        "save_pretrained: quantize_tied made one quantised table of the embedding and the head, and from_pretrained "
        "would initialise both at random",
        help="save_checkpoint(model, directory) writes files that load_checkpoint reads; untie_weights(model) converts "
        "the table back to float; or save the model before quantising it",
    )


def transformers_is_saving() -> bool:
    """Whether a caller is transformers' `save_pretrained`, and not a copy, a pickle, a load or `state_dict` itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == METHOD and frame.f_globals.get("__name__") == "transformers.modeling_utils":
            return True
        frame = frame.f_back
    return False


class UnsavedByTransformers(nn.Module):
    """A module whose state transformers' `save_pretrained` does not get: it raises instead."""

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        if transformers_is_saving():
            refuse_to_save()
        super()._save_to_state_dict(*arguments, **options)
