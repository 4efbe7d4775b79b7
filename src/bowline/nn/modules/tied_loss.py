"""`use_tied_loss`: makes an existing model, of transformers or any other, compute its loss without its logits."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from torch import nn

from bowline.errors import UsageError
from bowline.functional.loss.loss_options import check_backend
from bowline.nn.modules.heads import LMHead
from bowline.nn.tree.class_swap import is_swapped, own_class, swapped_class
from bowline.nn.tree.slots import expect_module

__all__ = ["TiedLoss", "use_tied_loss"]


class TiedLoss:
    """The handle that `use_tied_loss` returns: `remove()`, or leaving `with`, restores the classes of head and lookups.

    Attributes:
        head: the model's head.
    """

    def __init__(self, head: nn.Module, swapped: Iterable[nn.Module]) -> None:
        self.head = head
        self._classes = {module: (own_class(module), type(module)) for module in swapped}

    @classmethod
    def of(cls, model: nn.Module) -> TiedLoss:
        """The handle of a model that uses the tied loss, such as a copy (deep, or through a file) without a handle.

        Raises:
            UsageError: the model's head has no tied loss, or its class has been changed since.

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
        head = _head_of(model)
        if head is None or not is_swapped(head):
            raise UsageError(
                f"{type(model).__name__} has a head without use_tied_loss's class",
                help="call use_tied_loss(model), and keep what it returns",
            )
        ends = [one for one in model.modules() if is_swapped(one) and one.weight is head.weight]
        return cls(head, ends)

    def remove(self) -> None:
        """Restores the model; a second call does nothing.

        Raises:
            UsageError: the head or a lookup has been wrapped in something else since, which has to be removed first.
        """
        for module, kinds in self._classes.items():
            end = "the head" if module is self.head else "a lookup"
            seen = None if type(module) in kinds else f"the class {type(module).__qualname__}"
            if module is self.head and "forward" in module.__dict__:
                seen = "a forward"
            if seen:
                raise UsageError(
                    f"{end} has {seen} now, which is not use_tied_loss's",
                    help=f"remove what was put on {end} after it",
                )
        for module, (kind, _) in self._classes.items():
            module.__class__ = kind
        self._classes.clear()

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

    Under `torch.compile`, graphs end before the lookup and before the head, and these two and the loss run outside
    them. If a single graph is required (`fullgraph=True`, an export), it computes the logits and both gradients.

    Args:
        model: has `get_output_embeddings()`, whose module is a Linear: transformers' and Bowline's models.
        backend: the `backend` argument of `linear_cross_entropy`.

    Raises:
        UsageError: no such backend; no such head, one that this or another has hooked already, one that is quantised or
            wrapped, or one that does more than a Linear does (Idefics').

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
    head = _head_of(model)
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        kind = type(head)
        named = "no head" if head is None else f"a head of class {kind.__module__}.{kind.__qualname__}"
        seen = named if callable(getattr(model, "get_output_embeddings", None)) else "no get_output_embeddings()"
        raise UsageError(
            f"{type(model).__name__} has {seen}, expected a torch.nn.Linear with a floating-point weight",
            help="call bowline.linear_cross_entropy(hidden, weight, labels) where the loss is computed",
        )
    # imported here because they load torch's compiler, which takes a second
    from bowline.nn.modules.deferring_head import DeferringHead
    from bowline.nn.modules.uncompiled_lookup import UncompiledLookup

    if isinstance(head, DeferringHead):
        raise UsageError(
            f"the head of {type(model).__name__} has use_tied_loss's forward already",
            help="remove() that one before, of a copy by bowline.nn.TiedLoss.of(model).remove()",
        )
    if type(head).forward not in (nn.Linear.forward, LMHead.forward):
        raise UsageError(
            f"the head of {type(model).__name__} is a {type(head).__name__}, which has a forward of its own; "
            f"expected logits of nn.Linear",
            help="leave the model as it is; if they are hidden @ weight.T, call bowline.linear_cross_entropy",
        )
    if "forward" in head.__dict__:
        raise UsageError(
            f"the head of {type(model).__name__} has a forward of its own already", help="remove the other hook before"
        )
    classes: dict[nn.Module, type[nn.Module]] = {
        head: swapped_class(type(head), DeferringHead, type(head), loss_backend=backend)
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is weight:
            kind = type(module)  # replaces the forward of nn.Embedding by TiedEmbedding's, and nothing else
            after = () if issubclass(UncompiledLookup, kind) else (kind,)
            classes[module] = swapped_class(kind, *after, UncompiledLookup)
    for module, ours in classes.items():
        module.__class__ = ours
    return TiedLoss(head, classes)


def _head_of(model: nn.Module) -> nn.Module | None:
    ask = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = ask() if callable(ask) else None
    return head
