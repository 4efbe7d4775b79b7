"""Choosing the model class of a checkpoint by its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bowline.checkpoint import open_checkpoint
from bowline.errors import ConfigError
from bowline.models.common.stored_config import checked_path, stored_config

__all__ = ["class_at", "family_at", "load", "load_config", "model_class"]

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
"""Each class, and the module that defines it."""
WITH_HEAD = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "lstm": "LSTMLMHeadModel",
}
"""The class for each model_type if `architectures` names no class of `FAMILIES`."""


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load a checkpoint with the class that its config names; `options` are those of `from_pretrained`.

    Raises:
        ConfigError: no config, or the config of a model that Bowline does not have.
        CheckpointError: the checkpoint cannot be read.
    """
    return class_at(path).from_pretrained(path, **options)


def load_config(path: str | os.PathLike[str]) -> Any:
    """Load the config of a checkpoint with its family's config class.

    Raises:
        ConfigError: no config, or the config of a model that Bowline does not have.
    """
    return class_at(path).config_class.from_pretrained(path)


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the model class for the content of a `config.json`.

    It is the first of the `architectures` that Bowline has, or else the class with a head for the `model_type`.

    Raises:
        ConfigError: Bowline has neither.

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
        f"config: model_type is {model_type!r:.60} and architectures {stated!r:.120}. Bowline has no model of these, "
        f"expected one of the model types {', '.join(WITH_HEAD)} or of the architectures {', '.join(FAMILIES)}",
        help="use transformers for this model, and train it in its Trainer after bowline.use_tied_loss(model); "
        "`bowline audit` reads any model",
    )


def class_at(path: str | os.PathLike[str]) -> Any:
    """Return the model class for the checkpoint at `path` without reading weights. Raises the errors of `load`."""
    with open_checkpoint(checked_path(path)) as checkpoint:
        config = stored_config(checkpoint)
        try:
            return model_class(config)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.location}: {error.message}", help=error.help) from None


def family_at(path: str | os.PathLike[str]) -> str:
    """Return the family of the checkpoint at `path`, such as gpt2, from its config. Raises the errors of `load`."""
    return str(class_at(path).config_class.model_type)
