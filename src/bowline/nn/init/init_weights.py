"""`init_weights`: draws every weight of a model by a recipe, each shared matrix once, in its source's role."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.config.live_config import owner
from bowline.nn.init.draw import draw_
from bowline.nn.init.fan_sizes import fans, sizes_of
from bowline.nn.init.fused_matrices import Fused, output_axis
from bowline.nn.init.init_report import Drawn, InitReport
from bowline.nn.init.multipliers import MultiplierChange, own_multipliers, settle
from bowline.nn.init.roles import Found, Roles, survey
from bowline.nn.ties.tensor_comparison import is_plain, kind_of
from bowline.nn.tree.slots import Slot, named_modules, slots
from bowline.recipes import Recipe, Role
from bowline.recipes.expected import check_tie, named

__all__ = ["init_weights"]

DRAWABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
PACKED = frozenset({"qweight", "weight", "weight_packed", "values"})
"""Names of the buffers of quantised layers."""


@dataclass(frozen=True, eq=False)
class _Step:
    """One tensor, or one part of it, and the distribution to draw it from."""

    drawn: Drawn
    target: torch.Tensor
    scale: float
    offset: float


def init_weights(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    seed: int | None = None,
    roles: Roles | None = None,
    scales: Literal["recipe", "model"] = "recipe",
) -> InitReport:
    """Draw every weight of `model` by a recipe, in place: each storage once, a shared one by its source. Ties stay.

    Each tensor has a generator of its own, seeded by `seed` and by its name in the model without a head: modules may be
    registered in any order, a head may be there or not, tied or not, and the rest is drawn alike. Numbers are drawn
    where the tensor is, so that a GPU's are others than the CPU's.

    A recipe's multipliers belong to its numbers: where the config has `embed_scale`, `logit_scale` or T5's
    `scale_decoder_outputs`, they are set to what the recipe says. A norm that adds 1 to its weight (Gemma) gets what
    the recipe says less 1. Where the recipe zeroes padding, the row `padding_idx` of every table is zero.

    Args:
        model: of any kind; a transformers model or one of Bowline's needs nothing else.
        recipe: one of `bowline.recipes.RECIPES`, or its name.
        seed: `None` takes one from torch's global generator; the report states it.
        roles: roles that are not found, or found wrong; see `find_roles`.
        scales: `"recipe"`, or `"model"`: the multipliers stay what they are.

    Raises:
        UsageError: a recipe that does not fit the tie; an unknown role or size; a tensor without values (meta),
            quantised or sharded; a multiplier that differs from the recipe's and cannot be set. The model is
            unchanged.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(99, 64), "lm_head": nn.Linear(64, 99, bias=False)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(init_weights(model, "transformers-gpt2", seed=0))
        transformers-gpt2, seed 0: embeddings times 1, logits times 1, tied
        role             drawn from  std   where
        input embedding  N(0, 0.02)  0.02  wte.weight
    """
    recipe = named(recipe)
    if scales not in ("recipe", "model"):
        raise UsageError(f"scales={scales!r:.60}: expected 'recipe' or 'model'", argument="scales")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UsageError(f"seed={seed!r:.60}: expected a whole number or None", argument="seed")
    _check(model)
    found = survey(model, roles)
    if found.tied is not None:
        check_tie(recipe, found.tied)
    sizes = sizes_of(model, found)
    steps = list(_steps(recipe, found, sizes))
    setting, now = settle(model, recipe, found, sizes) if scales == "recipe" else (MultiplierChange(), None)
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    seeds = _seeds(model, list(found.roles), seed)
    generators: dict[str, torch.Generator] = {}
    with torch.no_grad():
        for step in steps:
            name = step.drawn.name
            if name not in generators:  # the parts of a fused tensor share a generator
                generators[name] = torch.Generator(step.target.device).manual_seed(seeds[name])
            draw_(step.target, step.drawn.distribution, step.scale, generators[name])
            if step.offset:
                step.target.sub_(step.offset)
        if recipe.zero_padding:
            _zero_padding(found)
    setting.apply(model)
    now = now or own_multipliers(model, found)
    return InitReport(
        recipe=recipe.name,
        seed=seed,
        drawn=tuple(step.drawn for step in steps),
        embed_scale=now.embed,
        logit_scale=now.logit,
        tied=found.tied,
    )


def _check(model: nn.Module) -> None:
    """Raise a `UsageError` for a tensor that cannot be filled in place."""
    for slot in slots(model).values():
        tensor = slot.tensor
        if not slot.is_parameter:
            small = not (tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.bool))
            if tensor.is_quantized or (small and slot.attribute in PACKED):
                raise UsageError(f"{slot.name}: is quantised ({tensor.dtype})", help="initialise first, then quantise")
            continue
        if tensor.is_meta:
            raise UsageError(
                f"{slot.name}: has no values (it is on meta), expected values to overwrite",
                help='with bowline.keep_tied(model): model.to_empty(device="cpu") gives it memory',
            )
        if not is_plain(tensor):
            raise UsageError(
                f"{slot.name}: is {kind_of(tensor)}, expected a plain tensor",
                help="initialise first, then shard or quantise",
            )
        if tensor.dtype not in DRAWABLE:
            raise UsageError(
                f"{slot.name}: is {tensor.dtype}, expected a floating-point dtype of at least 16 bits",
                help="initialise in a float dtype first, then quantise",
            )
        if tensor.is_inference() or any(
            size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            kind = "an inference tensor" if tensor.is_inference() else "expanded from fewer numbers"
            raise UsageError(
                f"{slot.name}: is {kind}, so it cannot be written in place", help="replace it with its clone()"
            )
    for name, module in named_modules(model):
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise UsageError(f"{name}: is a quantised {type(module).__name__}", help="initialise first, then quantise")


def _steps(recipe: Recipe, found: Found, sizes: dict[str, float]) -> Iterator[_Step]:
    offsets: dict[type[nn.Module], float] = {}
    for name, role in found.roles.items():
        slot = found.holders[name][0]
        if not isinstance(role, Fused):
            offset = _offset(slot, offsets) if role is Role.NORM_WEIGHT else 0.0
            yield _step(recipe, slot, role, slot.tensor.detach(), {**sizes, **_local(found, slot)}, offset)
            continue
        axis = output_axis(slot.module)
        for part, block in role.blocks(slot.tensor.detach(), axis):
            outputs = role.groups * block.shape[axis + 1]
            yield _step(recipe, slot, part, block, {**sizes, **_local(found, slot, outputs)}, 0.0)


def _local(found: Found, slot: Slot, outputs: int | None = None) -> dict[str, float]:
    """The sizes of one matrix; a recurrent layer has its own hidden size."""
    own = fans(found, slot.name, slot, outputs)
    if isinstance(slot.module, (nn.RNNBase, nn.RNNCellBase)):
        own["hidden_size"] = float(slot.module.hidden_size)
    return own


def _step(
    recipe: Recipe, slot: Slot, role: Role, target: torch.Tensor, sizes: dict[str, float], offset: float
) -> _Step:
    how = recipe.of(role)
    try:
        scale, mean, std = how.scale(sizes), how.mean(sizes), how.std(sizes)
    except UsageError as error:
        raise UsageError(
            f"{slot.name}, {role}: {error.message}", help="give the model a config that states this size"
        ) from None
    return _Step(Drawn(slot.name, role, how, mean, std), target, scale, offset)


def _offset(slot: Slot, seen: dict[type[nn.Module], float]) -> float:
    """The number that a norm adds to its weight, 0 or 1: found by running it with a weight of zeros."""
    kind = type(slot.module)
    if kind.__module__.startswith("torch."):
        return 0.0
    if kind not in seen:
        try:
            probe = copy.deepcopy(slot.module)
            with torch.no_grad():
                for parameter in probe.parameters():
                    parameter.zero_()
                out = probe(torch.linspace(0.5, 1.5, slot.tensor.numel()).to(slot.tensor)[None])
            seen[kind] = 1.0 if isinstance(out, torch.Tensor) and bool(out.any()) else 0.0
        except Exception:  # the norm takes other arguments
            seen[kind] = 0.0
    return seen[kind]


def _zero_padding(found: Found) -> None:
    for held in found.holders.values():
        for slot in held:
            if isinstance(slot.module, nn.Embedding) and slot.module.padding_idx is not None:
                slot.tensor[slot.module.padding_idx].zero_()


def _seeds(model: nn.Module, names: list[str], seed: int) -> dict[str, int]:
    """A different seed for each name in the model without a head; distinct in 32 bits, as the CPU uses no more."""
    root = owner(model)
    path = next((name for name, module in named_modules(model) if module is root), "")
    prefix = getattr(root, "base_model_prefix", "")
    taken: set[int] = set()
    seeds = {}
    for name in sorted(names):
        short = name.removeprefix(path + ".") if path else name
        short = short.removeprefix(prefix + ".") if isinstance(prefix, str) and prefix else short
        again = 0
        while True:
            text = f"{seed}:{short}:{again}" if again else f"{seed}:{short}"
            made = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
            if made not in taken:
                break
            again += 1
        taken.add(made)
        seeds[name] = made
    return seeds
