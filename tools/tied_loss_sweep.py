"""Checks that `use_tied_loss` keeps loss, gradients and logits on every transformers class with a head.

    python -m tools.tied_loss_sweep [--compiled] [--report FILE] [CLASS ...]

Each class that can be built tiny and takes labels makes three steps: as it is, with `use_tied_loss`, and after its
removal. With `--compiled` the second runs under torch.compile. The output ends with the counts, the differences, and
the classes that could not be run, with the reason.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import transformers

from bowline.errors import UsageError
from bowline.functional import shared_gradient
from bowline.functional.deferred import DeferredLogits, Product
from bowline.nn.modules.tied_loss import use_tied_loss
from tools.sweep import LARGEST, arguments_of, one_line
from tools.tiny import VOCABULARY, build, candidate_names, load_class

__all__ = ["KINDS", "Result", "run_class"]

KINDS = {
    "from hidden states": "no logits were made",
    "in part": "of several losses some from logits",
    "from logits": "the model needs them for something else",
    "refused": "by `use_tied_loss`, with a reason",
    "DIFFERS": "from what it was without",
    "not run": "its head has no step here, with `use_tied_loss` or without",
    "no head": "it has none, takes no labels, or cannot be built here",
}
BATCH, LENGTH = 2, 9
SPECIAL = 40
"""Ids at the end of a vocabulary that may be placeholders for images and the like."""
NEAR = 1e-4
"""Tolerance relative to a gradient's norm; both gradients are float32."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """The result of one class: one of `KINDS`, the reason, and the number of gradients of a tied matrix at once."""

    name: str
    kind: str
    reason: str = ""
    gradients: str = ""


@dataclass(frozen=True)
class Step:
    """The result of a forward and a backward pass."""

    loss: torch.Tensor
    gradients: Tensors
    outputs: Tensors

    def with_zeros_of(self, other: Step) -> Step:
        """This step plus the zero gradients of `other`; a graph gives them to parameters that its loss does not use."""
        zeros = {name: one for name, one in other.gradients.items() if not one.any()}
        return replace(self, gradients=zeros | self.gradients)


def inputs_of(model: Any, ignoring: bool) -> dict[str, torch.Tensor]:
    """The inputs of a model: ids, labels (some ignored), and the other inputs that are not text."""
    asked = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    size = min(VOCABULARY, len(model.get_output_embeddings().weight)) - SPECIAL
    ids, labels = (torch.randint(5, size, (BATCH, LENGTH), generator=generator) for _ in range(2))
    main = model.main_input_name
    given = {"labels": labels}
    if "input_ids" in asked:
        given |= {"input_ids": ids, "labels": ids.clone()}
    elif main == "input_features":
        config = model.config
        channels = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
        frames = 2 * config.max_source_positions
        shape = (BATCH, channels, frames) if hasattr(config, "num_mel_bins") else (BATCH, frames, channels)
        given[main] = torch.randn(shape, generator=generator)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in asked:
            given[name] = torch.tensor([0, 1])
    if ignoring:
        given["labels"][0, -2:] = -100
    return given


def step(model: Any, inputs: dict[str, torch.Tensor], compiled: bool = False) -> Step:
    """Make one step: the loss, the gradients of all parameters, and the outputs as wide as a vocabulary."""
    model.zero_grad()
    torch.compiler.reset()
    torch.manual_seed(0)
    output = (torch.compile(model, backend="aot_eager") if compiled else model)(**inputs, return_dict=True)
    output.loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    outputs = {name: one for name, one in output.items() if isinstance(one, torch.Tensor) and "logits" in name}
    return Step(output.loss.detach(), gradients, outputs)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count, within the context, the losses from hidden states, the logits computed, and the lookups' rows.

    Rows are added to the head's gradient (`add_rows`), after it is copied (`_copy`), or become a dense gradient of
    their own (`summed_rows`).
    """
    shared_gradient._counts_of_one_owner()  # measured once; the rows of its trial are no lookup's
    calls: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> Any:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            calls[name] += found is not None or name == "add_rows"
            return found

        return patch.object(owner, name, call)

    places = {Product: ("cross_entropy", "logits"), shared_gradient: ("add_rows", "_copy", "summed_rows")}
    with ExitStack() as patches:
        for owner, names in places.items():
            for name in names:
                patches.enter_context(counting(owner, name))
        yield calls


def run_class(name: str, compiled: bool = False) -> Result:
    """Build one class and make its three steps."""
    try:
        cls = load_class(name)
        model = build(cls)
    except Exception as error:  # any error of a model class is recorded as the reason
        return Result(name, "no head", one_line(error))
    if not has_head(model) or "labels" not in inspect.signature(model.forward).parameters:
        return Result(name, "no head")
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        return Result(name, "not run", "not tiny however its config is shrunk")
    try:
        inputs, plain = plain_step(model)
    except Exception as error:
        return Result(name, "not run", one_line(error))
    try:
        loss = use_tied_loss(model)
    except UsageError as error:
        return Result(name, "refused", str(error).splitlines()[0])
    with counted() as calls:
        try:
            tied = step(model, inputs, compiled)
        except Exception as error:
            loss.remove()
            if compiled and not compiles(model, inputs):
                return Result(name, "not run", f"torch.compile: {one_line(error)}")
            raise
    kind = "from logits" if not calls["cross_entropy"] else "in part" if calls["logits"] else "from hidden states"
    wrong = [*difference(plain.with_zeros_of(tied) if compiled else plain, tied)]
    loss.remove()
    if wrong and compiled:  # does torch.compile itself make the difference?
        wrong = [*difference(step(model, inputs, compiled).with_zeros_of(tied), tied)]
    if not torch.equal(step(model, inputs).loss, plain.loss):
        wrong.append("the loss after remove()")
    in_place = 0 if calls["summed_rows"] else calls["add_rows"] - calls["_copy"]
    return Result(name, "DIFFERS" if wrong else kind, ", ".join(wrong), gradients_of(model, in_place))


def compiles(model: Any, inputs: Tensors) -> bool:
    """Whether the unchanged model makes a step under torch.compile."""
    try:
        step(model, inputs, compiled=True)
    except Exception:
        return False
    return True


def gradients_of(model: Any, taken: int) -> str:
    """The number of gradients of the head's matrix, "one" or "two"; empty if it is not tied."""
    matrix = model.get_output_embeddings().weight
    lookups = [one for one in model.modules() if isinstance(one, torch.nn.Embedding) and one.weight is matrix]
    return "" if not lookups else "one" if taken else "two"


def has_head(model: Any) -> bool:
    """Whether the model has an output embedding."""
    try:
        return model.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def plain_step(model: Any) -> tuple[dict[str, torch.Tensor], Step]:
    """A step of the unchanged model, with some labels ignored if it can; made twice, since it must be reproducible."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for special in ("pad_token_id", "decoder_start_token_id"):  # needed where labels are shifted
            if getattr(config, special, None) is None:
                setattr(config, special, 0)
    inputs = inputs_of(model, ignoring=True)
    try:
        plain = step(model, inputs)
    except Exception:  # this model looks up every label
        inputs = inputs_of(model, ignoring=False)
        plain = step(model, inputs)
    if not plain.loss.isfinite():
        raise ValueError("its loss is not finite")
    if not torch.equal(step(model, inputs).loss, plain.loss):
        raise ValueError("its loss is another one each time")
    return inputs, plain


def difference(plain: Step, tied: Step) -> Iterator[str]:
    """The difference between two steps, in words."""
    if not torch.isclose(tied.loss.to(plain.loss.dtype), plain.loss, rtol=1e-5):
        yield f"loss {tied.loss.item():.6f} for {plain.loss.item():.6f}"
    if plain.gradients.keys() != tied.gradients.keys():
        yield f"gradients of {sorted(plain.gradients.keys() ^ tied.gradients.keys())}"
    for name in plain.gradients.keys() & tied.gradients.keys():
        expected = plain.gradients[name]
        if (tied.gradients[name] - expected).norm() > NEAR * expected.norm() + 1e-7:
            yield f"the gradient of {name}"
    if plain.outputs.keys() != tied.outputs.keys():
        yield f"outputs {sorted(plain.outputs.keys() ^ tied.outputs.keys())}"
    for name in plain.outputs.keys() & tied.outputs.keys():
        one, other = plain.outputs[name], tied.outputs[name]
        if isinstance(other, DeferredLogits):
            other = other.made()
        if one.dtype != other.dtype or not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            yield name


def main() -> int:
    arguments = arguments_of(__doc__, "--compiled")
    names = arguments.classes or candidate_names()
    results, started = [], time.monotonic()
    for at, name in enumerate(names, 1):
        try:
            result = run_class(name, arguments.compiled)
        except Exception as error:  # an error with use_tied_loss that did not occur without it
            result = Result(name, "DIFFERS", one_line(error))
        results.append(result)
        if arguments.classes or result.kind == "DIFFERS" or at % 50 == 0:
            print(f"[{at}/{len(names)}] {name}: {result.kind} {result.reason}", flush=True)
    text = summary(results, time.monotonic() - started)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n")
    return 1 if any(result.kind == "DIFFERS" for result in results) else 0


def summary(results: list[Result], seconds: float) -> str:
    """The counts, and the classes of each kind with their reasons, as Markdown."""
    counts = Counter(result.kind for result in results)
    lines = [
        f"# `use_tied_loss` on transformers {transformers.__version__}",
        "",
        f"{len(results)} classes; {seconds:.0f} s, torch {torch.__version__}.",
        "",
        "| the loss is computed | classes | |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in KINDS.items()),
        *both_ends(results),
    ]
    for kind in KINDS:
        if counts[kind] and kind != "no head":
            those = [one for one in results if one.kind == kind]
            lines += ["", f"## {kind[:1].upper()}{kind[1:]}", ""]
            lines += textwrap.wrap(", ".join(one.name for one in those if not one.reason), 120)
            lines += [f"- {one.name}: {one.reason}" for one in those if one.reason]
    return "\n".join(lines)


def both_ends(results: list[Result]) -> list[str]:
    """The number of tied classes whose ends share one gradient, and the classes that have two."""
    two = [result.name for result in results if result.gradients == "two"]
    one = sum(result.gradients == "one" for result in results)
    if not one and not two:
        return []
    told = f"Of the tied ones {one} have one gradient for both ends of the matrix, {len(two)} have two"
    return ["", *textwrap.wrap(f"{told}: {', '.join(two)}." if two else f"{told}.", 120)]


if __name__ == "__main__":
    sys.exit(main())
