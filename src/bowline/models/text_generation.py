"""Generating text and filling masks with a checkpoint and its tokenizer, for the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bowline.checkpoint import open_checkpoint
from bowline.checkpoint.formats.strict_json import loads
from bowline.checkpoint.places.file_set import FileSet
from bowline.checkpoint.places.local_directory import LocalDirectory
from bowline.errors import CheckpointError, UsageError
from bowline.models.auto import class_at
from bowline.models.bert import BertForMaskedLM
from bowline.models.common.from_pretrained import checked_device
from bowline.models.common.tokenizer import Tokenizer
from bowline.models.generation.fill_mask import FilledMask, fill_mask
from bowline.models.generation.generation_mixin import GenerationMixin
from bowline.wording import listed

__all__ = ["GENERATION", "filled_text", "text_pieces"]

GENERATION = "generation_config.json"
NEW_TOKENS = 40
"""The default number of new tokens."""


def text_pieces(
    path: str | os.PathLike[str],
    text: str,
    *,
    device: str = "cpu",
    seed: int | None = None,
    max_new_tokens: int | None = None,
    **options: Any,
) -> Iterator[str]:
    """Yield `text` and its continuation in pieces as they are generated; encoder-decoders yield only their output.

    If a space at the end of the text is a token of its own, it is removed, and the first new token must begin with a
    space: in byte-level models a space belongs to the word after it.
    The default of `max_new_tokens` is 40, or fewer if the table of positions has less room.
    `options` are those of `GenerationMixin.generate`; beam search yields one piece. If `options` do not have
    `do_sample`, the checkpoint's `generation_config.json` says whether and how tokens are drawn.

    Raises:
        UsageError: a model that does not generate, no tokenizer, a text without tokens, a device that does not exist,
            or a seed although nothing is drawn.
        CheckpointError: the checkpoint lacks a part of the model, which would be drawn at random.
    """
    cls = class_at(path)
    if not issubclass(cls, GenerationMixin):
        raise _other_head(path, cls, "next tokens", "masked ones", "fill-mask")
    tokenizer = Tokenizer.from_pretrained(path)
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError(f"{text!r} has no tokens", help="give a text to continue")
    model = _whole(cls, path, device)
    cross = model.config.is_encoder_decoder
    if not cross and len(ids) > 1 and tokenizer.decode(ids[-1:]) == " ":
        text = text.removesuffix(" ")
        ids = tokenizer.encode(text)
        spaced = tokenizer.beginning_with(" ")
        options["begin_suppress_tokens"] = [token for token in range(model.config.vocab_size) if token not in spaced]
    if "do_sample" not in options and options.get("num_beams", 1) == 1:
        options |= _stated_draws(path)
    if seed is not None:
        if not options.get("do_sample"):
            raise UsageError(
                f"seed={seed}: has no effect, because no token is drawn at random",
                help="add a temperature of 1 to draw tokens, or leave the seed out",
                argument="seed",
            )
        if not -(2**63) <= seed < 2**64:
            raise UsageError(
                f"seed={seed}: expected a whole number that fits into 64 bits",
                help="choose a small number, such as 0",
                argument="seed",
            )
        options["generator"] = torch.Generator(model.device).manual_seed(seed)
    options["max_new_tokens"] = _room(model, len(ids)) if max_new_tokens is None else max_new_tokens
    prompt = torch.tensor([ids], device=model.device)
    options["attention_mask"] = torch.ones_like(prompt)  # no token of the text is padding
    if options.get("num_beams", 1) == 1:
        new: Any = model.stream(prompt, **options)
    else:
        new = model.generate(prompt, **options)[0, 1 if cross else len(ids) :].tolist()
    return _pieces(tokenizer, new, "" if cross else text, [] if cross else ids)


def _room(model: Any, prompt: int) -> int:
    """Return the default number of new tokens, limited by the positions left; the last token needs none."""
    table = None if model.config.is_encoder_decoder else getattr(model.config, "max_position_embeddings", None)
    return NEW_TOKENS if table is None else max(1, min(NEW_TOKENS, table - prompt + 1))


def _stated_draws(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the sampling options of `generation_config.json`, or nothing if it does not ask for sampling.

    As in transformers, a missing `top_k` means the 50 likeliest tokens, and 0 means all tokens.
    """
    if Path(path).is_dir():
        content = _generation_config(LocalDirectory(path))
    else:
        with open_checkpoint(path) as checkpoint:
            content = _generation_config(checkpoint.files)
    if content.get("do_sample") is not True:
        return {}
    stated = {name: content.get(name) for name in ("do_sample", "temperature", "top_k", "top_p")}
    if stated["top_k"] in (None, 0):
        stated["top_k"] = 50 if stated["top_k"] is None else None
    return {name: value for name, value in stated.items() if value is not None}


def _generation_config(files: FileSet) -> dict[str, Any]:
    if not files.has(GENERATION):
        return {}
    content = loads(files.read(GENERATION), GENERATION)
    return content if isinstance(content, dict) else {}


def filled_text(path: str | os.PathLike[str], text: str, *, top_k: int = 5, device: str = "cpu") -> list[FilledMask]:
    """Fill the masks of `text` with the model and the tokenizer of a checkpoint, by `fill_mask`.

    Raises:
        UsageError: a model that cannot fill masks, no tokenizer, no mask in the text, a device that does not exist.
        CheckpointError: the checkpoint lacks a part of the model, which would be drawn at random.
    """
    cls = class_at(path)
    if cls.__name__ == "BertForPreTraining":  # the file has two heads, of which this needs one
        cls = BertForMaskedLM
    if issubclass(cls, GenerationMixin) or cls.output_embeddings is None:
        raise _other_head(path, cls, "masked tokens", "next ones", "generate")
    tokenizer = Tokenizer.from_pretrained(path)
    return fill_mask(_whole(cls, path, device), text, tokenizer, top_k)


def _other_head(path: str | os.PathLike[str], cls: type[Any], wanted: str, others: str, verb: str) -> UsageError:
    """Return the error for a model whose head predicts other tokens than are wanted, or that has none."""
    place, name = os.fspath(path), cls.__name__
    if cls.output_embeddings is not None:
        return UsageError(
            f"{place}: a {name} has no head that predicts {wanted}, only {others}", help=f"use `bowline {verb}`"
        )
    gives = "classes" if "Classification" in name else "hidden states"
    return UsageError(
        f"{place}: the checkpoint is a {name}, which has no head that predicts {wanted} or {others}",
        help=f"bowline.models.load gives its {gives}; `bowline train --init-from {place}` trains it with a head",
    )


def _pieces(tokenizer: Tokenizer, new: Any, text: str, ids: list[int]) -> Iterator[str]:
    if text:
        yield text
    yield from tokenizer.pieces(new, after=ids)


def _whole(cls: type[Any], path: str | os.PathLike[str], device: str) -> Any:
    if checked_device(device).type == "meta":
        raise UsageError(
            "device='meta': tensors on this device have no values, so nothing can be computed there",
            help="use cpu or cuda",
            argument="device",
        )
    model, info = cls.from_pretrained(path, device=device, output_loading_info=True)
    if info.missing_keys:
        raise CheckpointError(
            f"{os.fspath(path)}: has no {listed(info.missing_keys, 1)}, which {cls.__name__} would "
            "initialise at random",
            help="train these tensors first, or use a checkpoint that has them; random ones give meaningless answers",
        )
    return model
