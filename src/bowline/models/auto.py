"""The class that a checkpoint asks for, by its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bowline.checkpoint import open_checkpoint
from bowline.errors import ConfigError
from bowline.models.common.stored_config import checked_path, stored_config

__all__ = ["class_at", "load", "load_config", "model_class"]

FAMILIES = {
    "BertModel": "bert",
    "BertForPreTraining": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "GPT2Model": "gpt2",
    "GPT2LMHeadModel": "gpt2",
    "T5Model": "t5",
    "T5ForConditionalGeneration": "t5",
    "T5EncoderModel": "t5",
    "LSTMModel": "lstm",
    "LSTMLMHeadModel": "lstm",
}
"""Each class, and the file that it is in."""
WITH_HEAD = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "lstm": "LSTMLMHeadModel",
}
"""For each model_type, what a config without a class that is here gets."""


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """The model in a checkpoint, of the class its config names; `options` are those of `from_pretrained`.

    Raises:
        ConfigError: no config, or one of a model that is not here.
        CheckpointError: it cannot be read.
    """
    return class_at(path).from_pretrained(path, **options)


def load_config(path: str | os.PathLike[str]) -> Any:
    """The config of a checkpoint, of its family's class.

    Raises:
        ConfigError: no config, or one of a model that is not here.
    """
    return class_at(path).config_class.from_pretrained(path)


def model_class(config: Mapping[str, Any]) -> Any:
    """The class for the content of a `config.json`: of its `architectures`, the first that is here; else its
    model_type's class with a head.

    Raises:
        ConfigError: neither is here.

    Example:
        >>> model_class({"model_type": "gpt2", "architectures": ["GPT2DoubleHeadsModel"]}).__name__
        'GPT2LMHeadModel'
    """
    stated, model_type = config.get("architectures"), config.get("model_type")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    if isinstance(model_type, str) and model_type in WITH_HEAD:
        names.append(WITH_HEAD[model_type])
    for name in names:
        if name in FAMILIES:
            return getattr(import_module(f"bowline.models.{FAMILIES[name]}"), name)
    raise ConfigError(
        f"config: model_type is {model_type!r:.60} and architectures {stated!r:.120}, expected one of "
        f"{', '.join(WITH_HEAD)}, or of {', '.join(FAMILIES)}",
        help="use transformers for this model; `bowline audit` reads any",
    )


def class_at(path: str | os.PathLike[str]) -> Any:
    """The class for the checkpoint at `path`; its weights are not read. Raises as `load` does."""
    with open_checkpoint(checked_path(path)) as checkpoint:
        config = stored_config(checkpoint)
        try:
            return model_class(config)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.location}: {error.message}", help=error.help) from None
