"""Text in, text out: a checkpoint with its own tokenizer. What the command line does."""

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

__all__ = ["GENERATION", "filled_text", "text_pieces"]

GENERATION = "generation_config.json"
NEW_TOKENS = 40
"""Where no number is given."""


def text_pieces(
    path: str | os.PathLike[str],
    text: str,
    *,
    device: str = "cpu",
    seed: int | None = None,
    max_new_tokens: int | None = None,
    **options: Any,
) -> Iterator[str]:
    """The text and what follows it, piece by piece as it comes; behind an encoder, what follows alone.

    A space at the end of the text is not given to the model where it is a token of its own: to byte-level models a
    space belongs to the word after it, so the first new token is one that begins with it.
    Where no `max_new_tokens` are given there are 40 at most, or as many as the table of positions has room for.
    `options` are those of `GenerationMixin.generate`; beams come as one piece. Where they say nothing of `do_sample`,
    the checkpoint's `generation_config.json` says whether tokens are drawn, and how.

    Raises:
        UsageError: a model that does not generate, no tokenizer, a text without tokens, a device that is not there, a
            seed where nothing is drawn.
        CheckpointError: a checkpoint that lacks a part of the model, which would be drawn at random.
    """
    cls = class_at(path)
    if not issubclass(cls, GenerationMixin):
        raise UsageError(
            f"{os.fspath(path)}: a {cls.__name__} has no head for next tokens", help="`bowline fill-mask` is for BERT"
        )
    tokenizer = Tokenizer.from_pretrained(path)
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError(f"{text!r} has no tokens", help="give a text to go on from")
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
            raise UsageError(f"seed={seed}, and nothing is drawn", help="add a temperature of 1, or leave the seed out")
        if not -(2**63) <= seed < 2**64:
            raise UsageError(f"seed={seed}: expected a number of 64 bits", help="any from 0 will do")
        options["generator"] = torch.Generator(model.device).manual_seed(seed)
    options["max_new_tokens"] = _room(model, len(ids)) if max_new_tokens is None else max_new_tokens
    prompt = torch.tensor([ids], device=model.device)
    options["attention_mask"] = torch.ones_like(prompt)  # the text is all there is: nothing in it is padding
    if options.get("num_beams", 1) == 1:
        new: Any = model.stream(prompt, **options)
    else:
        new = model.generate(prompt, **options)[0, 1 if cross else len(ids) :].tolist()
    return _pieces(tokenizer, new, "" if cross else text, [] if cross else ids)


def _room(model: Any, prompt: int) -> int:
    """The usual number of new tokens, or what fits behind the prompt: the last one needs no position."""
    table = None if model.config.is_encoder_decoder else getattr(model.config, "max_position_embeddings", None)
    return NEW_TOKENS if table is None else max(1, min(NEW_TOKENS, table - prompt + 1))


def _stated_draws(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How `generation_config.json` says that tokens are drawn; nothing, where they are not.

    As transformers has it, they are drawn from the likeliest 50 where it does not say, and from all where it says 0.
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
    """`fill_mask` with the model and the tokenizer of a checkpoint.

    Raises:
        UsageError: a model that fills no masks, no tokenizer, no mask in the text, a device that is not there.
        CheckpointError: a checkpoint that lacks a part of the model, which would be drawn at random.
    """
    cls = class_at(path)
    if cls.__name__ == "BertForPreTraining":  # both of its heads are in the file; one is of use here
        cls = BertForMaskedLM
    if issubclass(cls, GenerationMixin) or cls.output_embeddings is None:
        raise UsageError(
            f"{os.fspath(path)}: a {cls.__name__} has no head for masks", help="`bowline generate` is for GPT-2 and T5"
        )
    tokenizer = Tokenizer.from_pretrained(path)
    return fill_mask(_whole(cls, path, device), text, tokenizer, top_k)


def _pieces(tokenizer: Tokenizer, new: Any, text: str, ids: list[int]) -> Iterator[str]:
    if text:
        yield text
    yield from tokenizer.pieces(new, after=ids)


def _whole(cls: type[Any], path: str | os.PathLike[str], device: str) -> Any:
    if checked_device(device).type == "meta":
        raise UsageError("device 'meta': holds no numbers, and nothing can be computed there", help="cpu, cuda")
    model, info = cls.from_pretrained(path, device=device, output_loading_info=True)
    if info.missing_keys:
        raise CheckpointError(
            f"{os.fspath(path)}: has no {info.missing_keys[0]}"
            f"{f' and {len(info.missing_keys) - 1} more' if len(info.missing_keys) > 1 else ''}, which "
            f"{cls.__name__} would draw at random",
            help="its answers would mean nothing: train the head first, or take a checkpoint that has one",
        )
    return model
