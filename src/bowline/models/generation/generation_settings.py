"""What a person asked of `generate`, checked before any work: sizes, tokens that end a row, how the next is chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from bowline.errors import UsageError
from bowline.models.common.input_checks import check_ids, check_tensor

__all__ = ["Settings", "checked_mask", "settings_for"]

NEW_TOKENS = 20
"""Where no length is given: transformers' number."""
LARGEST_LOG = math.log(torch.finfo(torch.float32).max)
"""Of what a score can be divided by."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One call of `generate`, every default resolved."""

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    repetition_penalty: float
    begin_suppress: tuple[int, ...]
    eos: tuple[int, ...]
    pad: int | None
    stop: tuple[tuple[int, ...], ...]
    generator: torch.Generator | None
    use_cache: bool

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Every sequence of new tokens that ends a row, stop sequences and end-of-text tokens alike."""
        return (*self.stop, *((token,) for token in self.eos))


def settings_for(  # noqa: C901 - one check per option
    model: Any,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    min_new_tokens: int = 0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    repetition_penalty: float = 1.0,
    begin_suppress_tokens: Sequence[int] = (),
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop: int | Sequence[int | Sequence[int]] | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Settings:
    """The arguments of `GenerationMixin.generate`, resolved against the model's config.

    Raises:
        UsageError: one that means nothing, or two that contradict each other.
    """
    config = model.config
    check_ids(input_ids, config.vocab_size)
    _whole("num_beams", num_beams, 1)
    if num_beams > config.vocab_size:
        _refuse("num_beams", num_beams, f"at most the {config.vocab_size} tokens that there are")
    _whole("min_new_tokens", min_new_tokens, 0)
    if not (_is_number(temperature) and temperature > 0):
        _refuse("temperature", temperature, "a number above 0", help="for the likeliest token, do_sample=False")
    if top_k is not None:
        _whole("top_k", top_k, 1)
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        _refuse("top_p", top_p, "above 0 and at most 1")
    if not _is_number(length_penalty):
        _refuse("length_penalty", length_penalty, "a number")
    if not (_is_number(repetition_penalty) and repetition_penalty > 0):
        _refuse("repetition_penalty", repetition_penalty, "a number above 0, and 1 for none")
    begin_suppress = _tokens("begin_suppress_tokens", begin_suppress_tokens)
    if not _leaves_one(config.vocab_size, begin_suppress):
        _refuse("begin_suppress_tokens", begin_suppress_tokens, "to leave one token to begin with")
    if early_stopping not in (True, False, "never"):
        _refuse("early_stopping", early_stopping, "True, False or 'never'")
    if do_sample and num_beams > 1:
        raise UsageError(
            f"do_sample=True and num_beams={num_beams}: beams are not sampled",
            help="use only one of them",
            argument=("do_sample", "num_beams"),
        )
    if not do_sample and (temperature != 1 or top_k is not None or top_p is not None):
        raise UsageError(
            "temperature, top_k and top_p: have an effect only if tokens are drawn, and do_sample is False",
            help="set do_sample=True, or leave them out",
            argument=("temperature", "top_k", "top_p"),
        )

    given = config.eos_token_id if eos_token_id is None else eos_token_id
    eos = _tokens("eos_token_id", () if given is None else given)
    if min_new_tokens and not _leaves_one(config.vocab_size, (*begin_suppress, *eos)):
        why = "since eos_token_id and begin_suppress_tokens leave no other token to begin with"
        _refuse("min_new_tokens", min_new_tokens, f"0, {why}")
    pad = config.pad_token_id if pad_token_id is None else pad_token_id
    if pad is not None:
        _whole("pad_token_id", pad, 0)
        if pad >= config.vocab_size:
            _refuse("pad_token_id", pad, f"one of the {config.vocab_size} tokens that there are")
    if stop is not None and not isinstance(stop, (int, list, tuple)):
        _refuse("stop", stop, "tokens, or sequences of tokens", help="tokenizer.encode makes them of a text")
    sequences = tuple(_tokens("stop", one) for one in ((stop,) if isinstance(stop, int) else stop or ()))
    if () in sequences:
        raise UsageError("stop has an empty sequence, with which every text ends", help="leave it out")
    if pad is None:
        pad = next((token for token in eos if token < config.vocab_size), None)
    if pad is None and sequences and len(input_ids) > 1:
        raise UsageError(
            "rows that stop early need padding, and the config has no pad_token_id", help="give pad_token_id"
        )

    if generator is not None and not isinstance(generator, torch.Generator):
        _refuse("generator", generator, "a torch.Generator")
    for name, value in (("do_sample", do_sample), ("use_cache", use_cache)):
        if not isinstance(value, bool):
            _refuse(name, value, "True or False")
    new = _new_tokens(model, input_ids.shape[1], max_new_tokens, max_length)
    if min_new_tokens > new:
        _refuse("min_new_tokens", min_new_tokens, f"at most the {new} new tokens that there may be")
    if num_beams > 1 and abs(length_penalty) * math.log(new) > LARGEST_LOG:
        most = LARGEST_LOG / math.log(new)
        _refuse("length_penalty", length_penalty, f"{-most:.3g} to {most:.3g}, where {new} tokens may be new")
    return Settings(
        max_new_tokens=new,
        min_new_tokens=min_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        repetition_penalty=repetition_penalty,
        begin_suppress=begin_suppress,
        eos=eos,
        pad=pad,
        stop=sequences,
        generator=generator,
        use_cache=use_cache,
    )


def _new_tokens(model: Any, prompt: int, new: int | None, total: int | None) -> int:
    """The most tokens that may be new; a decoder behind an encoder begins with one, its start token."""
    if new is not None and total is not None:
        raise UsageError(
            f"max_new_tokens={new} and max_length={total}",
            help="give one of them",
            argument=("max_new_tokens", "max_length"),
        )
    if new is not None:
        _whole("max_new_tokens", new, 1)
    cross = model.config.is_encoder_decoder
    begins = 1 if cross else prompt
    if total is not None:
        _whole("max_length", total, 1)
        if total <= begins:
            _refuse("max_length", total, f"more than the {begins} tokens it begins with", help="or max_new_tokens")
        new = total - begins
    table = None if cross else getattr(model.config, "max_position_embeddings", None)
    if table is None:
        return new or NEW_TOKENS
    if prompt > table:
        raise UsageError(
            f"the prompt has {prompt} tokens, and the table of positions has {table} rows",
            help="shorten the prompt, or use a model with more positions",
        )
    if new is None:
        return min(NEW_TOKENS, max(table - prompt, 1))
    if prompt + new - 1 > table:  # the last token is not looked at again
        raise UsageError(
            f"the prompt has {prompt} tokens and {new} are to be added, but the table of positions has {table} rows",
            help=f"max_new_tokens={table - prompt + 1} at most, or shorten the prompt",
            argument="max_new_tokens",
        )
    return new


def checked_mask(mask: torch.Tensor | None, input_ids: torch.Tensor, settings: Settings, *, left: bool) -> Any:
    """The prompts' mask (B, T), or `None` where every token counts. Without one, padding tokens in a decoder's
    prompts (`left`) are padding, unless they end texts too; an encoder sees them all, as in transformers.

    Raises:
        UsageError: another shape, a row without a token, or (`left`) a row that ends in padding.
    """
    if mask is None:
        if not left or settings.pad is None or settings.pad in settings.eos:
            return None
        mask = input_ids != settings.pad
    check_tensor(mask, "attention_mask")
    if mask.shape != input_ids.shape:
        raise UsageError(
            f"attention_mask {tuple(mask.shape)}: expected {tuple(input_ids.shape)}, the shape of input_ids"
        )
    mask = (mask != 0).to(input_ids.device)
    if mask.all():
        return None
    if not mask.any(1).all():
        row = int((~mask.any(1)).nonzero()[0])
        raise UsageError(f"row {row} of the batch has only padding", help="leave the row out")
    if left and not mask[:, -1].all():
        row = int((~mask[:, -1]).nonzero()[0])
        raise UsageError(f"row {row} ends in padding, after which its next token would come", help="pad on the left")
    return mask.long()


def _leaves_one(vocab_size: int, banned: tuple[int, ...]) -> bool:
    """Whether there is a token that is not banned."""
    return len({token for token in banned if token < vocab_size}) < vocab_size


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(name, value, f"a whole number from {least}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _tokens(name: str, given: Any) -> tuple[int, ...]:
    """One token or several, as several."""
    tokens = (given,) if isinstance(given, int) else given
    if not isinstance(tokens, (list, tuple)) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**63 for one in tokens
    ):
        _refuse(name, given, "whole numbers from 0, each a token")
    return tuple(tokens)


def _refuse(name: str, value: Any, expected: str, help: str | None = None) -> NoReturn:
    raise UsageError(f"{name}={value!r:.60}: expected {expected}", help=help, argument=name)
