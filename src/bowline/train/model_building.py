"""Building the model and the batches that a training configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bowline.errors import ConfigError, UsageError
from bowline.models import BertConfig, GPT2Config, LSTMConfig, PreTrainedModel, T5Config
from bowline.models.auto import family_at, model_class
from bowline.models.common.from_pretrained import checked_device
from bowline.models.common.stored_config import checked_path
from bowline.nn import tie_weights, untie_weights
from bowline.nn.init import init_weights
from bowline.train.loop.observations import tie_state
from bowline.train.text.objectives import CausalBatches, MaskedBatches, SpanBatches
from bowline.train.text.packed_tokens import Packed
from bowline.train.text.tokenizer_training import TextTokenizer
from bowline.train.train_config import TrainConfig

__all__ = ["batches_for", "begins_at_unigram", "check_model", "model_for", "settle_biases"]

CONFIGS: dict[str, Any] = {"gpt2": GPT2Config, "bert": BertConfig, "t5": T5Config, "lstm": LSTMConfig}
POSITIONS = {"gpt2": "n_positions", "bert": "max_position_embeddings"}


def model_for(config: TrainConfig, tokenizer: TextTokenizer, packed: Packed) -> PreTrainedModel:
    """Build the model before its first step, on `config.device`. Equal seeds give equal models.

    Args:
        config: see `TrainConfig`.
        tokenizer: the tokenizer that gives the size of the vocabulary and the ids of special tokens.
        packed: the text; its tokens are counted if the head's bias begins at their frequencies.

    Raises:
        UsageError: a key that the model's config does not have, a bias for a head without one, more tokens or positions
            than a checkpoint has, or a tie to be undone in a model that is not tied.
        ConfigError: an invalid value, or a checkpoint of another family.
        TieError: `tie` for a checkpoint in which head and table differ.
    """
    device = checked_device(config.device)
    if device.type == "meta":
        raise UsageError(
            "device='meta': tensors on this device have no values, so nothing can be trained there",
            help="use cpu or cuda",
            argument="device",
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = _taken(config, tokenizer) if config.init_from is not None else _drawn(config, tokenizer)
    if config.untie_at_step is not None and tie_state(model) == "untied":
        raise UsageError(
            f"untie_at_step={config.untie_at_step}: the head of {config.init_from} has its own matrix already",
            help="leave --untie-at-step out, or add --tie to tie it first",
            argument="untie_at_step",
        )
    if begins_at_unigram(config, model):
        _begin_at_unigram(model, packed)
    return model.to(device)


def begins_at_unigram(config: TrainConfig, model: PreTrainedModel) -> bool:
    """True if the head's bias begins at token frequencies: by request, or by the size's default if it has a bias."""
    asked = config.head_bias is not None
    return bool(config.value("head_bias") == "unigram") and (asked or _head_bias(model) is not None)


def batches_for(config: TrainConfig, tokenizer: TextTokenizer, packed: Packed) -> CausalBatches:
    """Make the batches of the family's objective from the packed text.

    Raises:
        UsageError: too little text, or a length that the objective does not allow.
    """
    options: dict[str, Any] = {name: config.value(name) for name in ("length", "batch_size", "accumulation")}
    options |= {"seed": config.seed, "held_out_tokens": config.held_out_tokens}
    rows = packed.train, packed.held_out
    if config.family == "bert":
        assert tokenizer.begin is not None
        assert tokenizer.mask is not None
        return MaskedBatches(
            *rows,
            begin=tokenizer.begin,
            separator=tokenizer.separator,
            mask=tokenizer.mask,
            vocab_size=len(tokenizer),
            special=tokenizer.special,
            share=config.value("mask_share"),
            random_tokens=config.random_tokens,
            **options,
        )
    if config.family == "t5":
        share = config.value("mask_share")
        return SpanBatches(*rows, sentinels=tokenizer.sentinels, eos=tokenizer.separator, share=share, **options)
    return CausalBatches(*rows, **options)


@torch.no_grad()
def settle_biases(model: PreTrainedModel) -> None:
    """Copy the trained bias of an untied BERT to its second name, so that every loader finds the trained one.

    Untied, `cls.predictions.bias` is unused and not trained. Files hold both, and transformers 4 loads either.
    """
    for target, source in model.ties.items():
        if target.endswith(".bias"):
            model.get_parameter(source).copy_(model.get_parameter(target))


def check_model(config: TrainConfig) -> None:
    """Check the config of a new model, or the family of a checkpoint, before text or weights are read.

    Raises:
        UsageError: as `model_for`.
        ConfigError: as `model_for`.
    """
    if config.init_from is None:
        _config(config, config.vocab_size or config.preset.vocab_size, {})
    else:
        _check_family(config)


def _drawn(config: TrainConfig, tokenizer: TextTokenizer) -> PreTrainedModel:
    made = _config(config, len(tokenizer), _ids(config.family, tokenizer))
    model: PreTrainedModel = model_class({"model_type": config.family})(made)
    if config.drawn_by is not None:
        init_weights(model, config.drawn_by, seed=config.seed)
    return model


def _config(config: TrainConfig, vocab_size: int, ids: Mapping[str, int | None]) -> Any:
    family, length = config.family, config.value("length")
    keys: dict[str, Any] = {"vocab_size": vocab_size, **ids}
    keys["tie_word_embeddings"] = config.tie is not False
    if config.pad_logit is not None:
        keys["pad_logit"] = config.pad_logit
    if family in POSITIONS:
        usual = getattr(CONFIGS[family](), POSITIONS[family])
        keys[POSITIONS[family]] = length if config.size == "nano" else max(usual, length)
    fixed = sorted(keys.keys() & config.model.keys() - set(POSITIONS.values()))
    if fixed:
        raise UsageError(
            f"model: {fixed[0]} cannot be set here, because the tokenizer or an option of its own determines it",
            help=f"leave {fixed[0]} out of model",
            argument="model",
        )
    made = CONFIGS[family](vocab_size=vocab_size).updated(**{**keys, **config.preset.model, **config.model})
    _check_positions(made, config)
    return made


def _ids(family: str, tokenizer: TextTokenizer) -> dict[str, int | None]:
    if family == "bert":
        return {"pad_token_id": tokenizer.pad}
    if family == "t5":
        return {"pad_token_id": tokenizer.pad, "eos_token_id": tokenizer.separator}
    return {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}


def _taken(config: TrainConfig, tokenizer: TextTokenizer) -> PreTrainedModel:
    """Load the checkpoint to fine-tune, with a head for the family's objective."""
    place = checked_path(config.init_from)
    _check_family(config)
    changes = {} if config.pad_logit is None else {"pad_logit": config.pad_logit}
    model: PreTrainedModel = model_class({"model_type": config.family}).from_pretrained(place, **changes)
    if model.config.vocab_size < len(tokenizer):
        raise UsageError(
            f"{config.init_from}: its table has {model.config.vocab_size} rows, fewer than the {len(tokenizer)} tokens "
            "of its tokenizer",
            help="add the missing rows with bowline.nn.resize_vocab",
        )
    if config.pad_logit == "mask" and model.config.pad_token_id is None:
        raise UsageError(
            f"pad_logit='mask': the config of {config.init_from} has no pad_token_id",
            help="leave --pad-logit out, or set pad_token_id in the config",
            argument="pad_logit",
        )
    _check_positions(model.config, config)
    if config.tie is True:
        tie_weights(model)
    elif config.tie is False:
        untie_weights(model)
    return model


def _check_family(config: TrainConfig) -> None:
    found = family_at(checked_path(config.init_from))
    if found != config.family:
        raise ConfigError(
            f"{config.init_from}: expected a checkpoint of the family {config.family}, got one of {found}",
            help=f"--family {found}, or leave it out",
        )


def _check_positions(made: Any, config: TrainConfig) -> None:
    table = getattr(made, POSITIONS.get(config.family, ""), None)
    if table is not None and config.value("length") > table:
        raise UsageError(
            f"length={config.value('length')}: expected at most {table}, the number of positions in the model",
            help=f"--length {table}",
            argument="length",
        )


@torch.no_grad()
def _begin_at_unigram(model: PreTrainedModel, packed: Packed) -> None:
    bias = _head_bias(model)
    if bias is None:
        raise UsageError(
            f"head_bias='unigram': the head of this {type(model).__name__} has no bias",
            help="leave --head-bias out, or build the model with a bias",
            argument="head_bias",
        )
    bias.copy_(torch.from_numpy(packed.unigram(len(bias))).log())


def _head_bias(model: PreTrainedModel) -> nn.Parameter | None:
    bias = getattr(model.get_output_embeddings(), "bias", None)
    return bias if isinstance(bias, nn.Parameter) else None
