"""`use_tied_loss`: makes an existing model, of transformers or any other, compute its loss without its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from torch import nn

from bowline.errors import UsageError
from bowline.functional.loss.loss_options import check_backend
from bowline.nn.modules.adapted_ends import SETTING, head_of
from bowline.nn.tree.class_swap import own_class
from bowline.nn.tree.slots import expect_module

__all__ = ["TiedLoss", "TiedLossStatus", "use_tied_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedLossStatus:
    """What is in force: the backend that was asked for, the losses so far by the backend that ran, and full logits.

    `fallbacks`: how often all logits were computed after all, for something that takes gradients; `reasons`: by what.
    """

    backend: str
    losses: Mapping[str, int]
    fallbacks: int
    reasons: Mapping[str, int]

    def __str__(self) -> str:
        ran = ", ".join(f"{count} by {name!r}" for name, count in self.losses.items()) or "none yet"
        lines = [f"backend {self.backend!r}; losses without full logits: {ran}; full logits: {self.fallbacks}"]
        return "\n".join([*lines, *(f"  {count} because of {reason}" for reason, count in self.reasons.items())])


class TiedLoss:
    """The handle that `use_tied_loss` returns: `remove()`, or leaving `with`, restores the classes of the modules.

    Attributes:
        model: the model that was given.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        from bowline.nn.modules.followed_ends import Setting, swapped_in

        self._setting: Setting = model.__dict__[SETTING]
        self._classes = {module: (own_class(module), type(module)) for module in swapped_in(model)}

    @classmethod
    def of(cls, model: nn.Module) -> TiedLoss:
        """The handle of a model that uses the tied loss, such as a copy (deep, or through a file) without a handle.

        Raises:
            UsageError: the model does not use the tied loss.

        Example:
            >>> from copy import deepcopy
            >>> from bowline.models import GPT2Config, GPT2LMHeadModel
            >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1, n_positions=8))
            >>> loss = use_tied_loss(model)
            >>> copied = deepcopy(model)
            >>> TiedLoss.of(copied).remove()
            >>> type(copied.lm_head).forward is type(model.lm_head).forward
            False
        """
        expect_module(model)
        head = head_of(model)
        for module in model.modules():  # PEFT's model, for one, is around the model that was given
            if SETTING in module.__dict__ and head_of(module) is head:
                return cls(module)
        raise UsageError(
            f"{type(model).__name__} has a head without use_tied_loss's class",
            help="call use_tied_loss(model), and keep what it returns",
        )

    @property
    def head(self) -> nn.Module | None:
        """The model's head, as `get_output_embeddings()` gives it."""
        return head_of(self.model)

    @property
    def status(self) -> TiedLossStatus:
        """What is in force, and what happened so far.

        Example:
            >>> import torch
            >>> model = nn.ModuleDict({"lm_head": nn.Linear(4, 9)})
            >>> model.get_output_embeddings = lambda: model["lm_head"]
            >>> loss = use_tied_loss(model, backend="chunked")
            >>> _ = nn.functional.cross_entropy(model["lm_head"](torch.ones(2, 4)), torch.tensor([1, 8]))
            >>> print(loss.status)
            backend 'chunked'; losses without full logits: 1 by 'chunked'; full logits: 0
        """
        record = self._setting.record
        reasons = dict(record.fallbacks)
        return TiedLossStatus(
            backend=self._setting.backend,
            losses=dict(record.computed),
            fallbacks=sum(reasons.values()),
            reasons=reasons,
        )

    def remove(self) -> None:
        """Restores the model; a second call does nothing.

        Raises:
            UsageError: the head or a lookup has been wrapped in something else since, which has to be removed first.
        """
        if self.model.__dict__.get(SETTING) is not self._setting:
            return
        from bowline.nn.modules.followed_ends import swapped_in

        now = list(swapped_in(self.model))
        for module, kinds in self._classes.items():
            end = "the model" if module is self.model else "the head" if isinstance(module, nn.Linear) else "a lookup"
            seen = None if type(module) in kinds else f"the class {type(module).__qualname__}"
            if isinstance(module, nn.Linear) and "forward" in module.__dict__:
                seen = "a forward"
            if seen:
                raise UsageError(
                    f"{end} has {seen} now, which is not use_tied_loss's",
                    help=f"remove what was put on {end} after it",
                )
        for module, kind in {module: own_class(module) for module in (*self._classes, *now)}.items():
            module.__class__ = kind
            module.__dict__.pop("loss_record", None)
        del self.model.__dict__[SETTING]

    def __enter__(self) -> TiedLoss:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def use_tied_loss(model: nn.Module, *, backend: str = "auto") -> TiedLoss:
    """Makes the model compute its `loss` by `linear_cross_entropy`, without float32 copies of the logits.

    The head then returns logits that are computed only when something needs them (`bowline.functional.deferred`). The
    steps between head and `cross_entropy` (a cast, a scale, a softcap, a bias) are recorded and passed to the loss. So
    `output.logits` is available on request, generation works as before, and a model that does something else with its
    logits computes what it did before. Embeddings that use the head's matrix look up by `tied_embedding`, with one
    gradient for both ends. Weights, names and files are untouched.

    PEFT's adapters may be put on before or after: LoRA on the head adds a thin product, trained rows replace the logits
    of their tokens, and a saved copy of the head is used as the head is. Each forward pass looks whether the head has
    changed. If all logits are needed after all for something that takes gradients, such as DoRA on the head, they are
    computed, and the first time for each reason a warning says so; `TiedLoss.status` counts them.

    A head whose weight is a DTensor with its rows split over processes (tensor parallelism, after the tie was restored:
    `head.weight = embedding.weight`) computes the loss of its rows on each process, and no process has all logits until
    something needs them. The head may be in the plan as `ColwiseParallel`, or not in it.

    Under `torch.compile`, graphs end before the lookup and before the head, and these two and the loss run outside
    them. If a single graph is required (`fullgraph=True`, an export), it computes the logits and both gradients.

    Args:
        model: has `get_output_embeddings()`, whose module is a Linear: transformers' and Bowline's models.
        backend: the `backend` argument of `linear_cross_entropy`.

    Raises:
        UsageError: no such backend; no such head, one that this or another has hooked already, one that is quantised or
            wrapped by other than PEFT, or one that does more than a Linear does (Idefics').

    Example:
        >>> import torch
        >>> class Tiny(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.lm_head = nn.Linear(4, 9, bias=False)
        ...     def get_output_embeddings(self):
        ...         return self.lm_head
        ...     def forward(self, hidden, labels):
        ...         return nn.functional.cross_entropy(self.lm_head(hidden).float(), labels)
        >>> model, hidden, labels = Tiny(), torch.ones(2, 4), torch.tensor([1, 8])
        >>> plain = model(hidden, labels)
        >>> with use_tied_loss(model):
        ...     torch.testing.assert_close(model(hidden, labels), plain)
    """
    expect_module(model)
    check_backend(backend)
    # imported here because it loads torch's compiler, which takes a second
    from bowline.nn.modules.followed_ends import follow_from_now

    follow_from_now(model, backend)
    return TiedLoss(model)
