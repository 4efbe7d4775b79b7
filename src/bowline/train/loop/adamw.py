"""AdamW (Loshchilov and Hutter, 2017) with the field's two groups: matrices decay, biases and norms do not.

Which of the two an embedding belongs to is a convention, and a tied matrix is an embedding and a head at once. nanoGPT,
Megatron and transformers' `Trainer` decay every matrix, embeddings among them: so does this file, and a tied matrix
decays, once. (minGPT kept embeddings out.) What it means: decay draws every row towards zero at each step, also rows
that no batch looked up; a tied matrix has a gradient in all rows through its head, and holds them against it.

AdamW's steps have the size of the rate, whatever the size of what they change. T5's table is drawn with std 1 where the
logits are multiplied by d^-1/2: the same function as a table of std d^-1/2 whose looked-up rows are multiplied by d^1/2
(Vaswani et al., 2017), but for AdamW a table that learns d^1/2 times more slowly. T5's authors had Adafactor, whose
steps are a share of what they change (Shazeer and Stern, 2018). `embedding_rate` is the factor that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.optim import AdamW, Optimizer

from bowline.errors import UsageError
from bowline.nn.config.head_scaling import head_scale
from bowline.nn.ties.optimizer_groups import group_of
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.untying import untie_weights
from bowline.nn.tree.unique_parameters import unique_parameters
from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["Groups", "adamw", "decay_groups", "untie"]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The names of the parameters that decay and of those that do not, each parameter under one name; `tied` of them.

    `tied` has, for each matrix or bias that several names share, all its names, the one that stands in a group first;
    `rates` what the rate is multiplied by, where it is not 1.
    """

    decayed: dict[str, nn.Parameter]
    plain: dict[str, nn.Parameter]
    tied: tuple[tuple[str, ...], ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = []
        for title, group in (("with weight decay", self.decayed), ("without", self.plain)):
            count = sum(parameter.numel() for parameter in group.values())
            parts.append(f"{len(group)} tensor{'s' * (len(group) != 1)} of {count:,} numbers {title}")
        for names in self.tied:
            where = "with weight decay" if names[0] in self.decayed else "without"
            parts.append(f"{names[0]} (also {', '.join(names[1:])}) is one parameter, {where}")
        parts += [f"{name} learns at {rate:.3g} times the rate" for name, rate in self.rates.items()]
        return "; ".join(parts)


def decay_groups(model: nn.Module, embedding_rate: float = 1.0) -> Groups:
    """The trainable parameters of `model`, those of two or more dimensions apart from the others.

    Args:
        model: what is trained.
        embedding_rate: what the rate of `model.get_input_embeddings()` is multiplied by, and its decay divided by.

    Raises:
        UsageError: a rate for the embedding, and the model does not say which it is.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(decay_groups(model))  # doctest: +NORMALIZE_WHITESPACE
        1 tensor of 36 numbers with weight decay; 1 tensor of 9 numbers without;
        wte.weight (also lm_head.weight) is one parameter, with weight decay
    """
    once = {id(parameter) for parameter in unique_parameters(model)}
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in once}
    shared: dict[str, list[str]] = {}
    for tie in find_ties(model):
        shared.setdefault(tie.source, [tie.source]).append(tie.target)
    tied = []
    for names in shared.values():
        first = [name for name in names if name in named]
        tied += [(*first, *(name for name in names if name not in first))] if first else []
    rates = {}
    if embedding_rate != 1.0:
        table = _embedding(model)
        rates = {name: embedding_rate for name, parameter in named.items() if parameter is table}
    return Groups(
        decayed={name: parameter for name, parameter in named.items() if parameter.ndim >= 2},
        plain={name: parameter for name, parameter in named.items() if parameter.ndim < 2},
        tied=tuple(tied),
        rates=rates,
    )


def _embedding(model: nn.Module) -> nn.Parameter:
    found = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(found, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UsageError(
            f"embedding_rate: {type(model).__name__} does not say which its embedding is",
            help="leave it at 1, or give the model get_input_embeddings()",
        )
    return weight


def adamw(groups: Groups, settings: TrainerSettings) -> AdamW:
    """The optimizer of these groups, fused into one kernel for each tensor; `group["rate"]` multiplies the rate."""
    parts = []
    for parameters, decay in ((groups.decayed, settings.weight_decay), (groups.plain, 0.0)):
        for rate in sorted({groups.rates.get(name, 1.0) for name in parameters}):
            params = [each for each in parameters.items() if groups.rates.get(each[0], 1.0) == rate]
            parts.append({"params": params, "weight_decay": decay / rate, "rate": rate})
    floating = all(parameter.is_floating_point() for group in parts for _, parameter in group["params"])  # type: ignore[attr-defined]
    return AdamW(parts, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=floating)


def untie(model: nn.Module, optimizer: Optimizer) -> None:
    """`untie_weights` within a run: what the head learns in a step stays what it was.

    A T5's head takes the factor of its logits upon itself and is that much smaller than the table: so is its rate.
    """
    scale = head_scale(model)
    if not untie_weights(model, optimizer=optimizer) or scale == 1.0:
        return
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    group = group_of(optimizer, head)
    if group is None:  # it is not trained
        return
    at = next(at for at, parameter in enumerate(group["params"]) if parameter is head)
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    own["params"] = [(group["param_names"].pop(at), group["params"].pop(at))]
    optimizer.add_param_group(own | {"rate": group["rate"] * scale, "weight_decay": group["weight_decay"] / scale})
