"""Rules about tensors that the class will not find, because they are stored under other names than its own."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.formats.wrapper_names import AddedPart, added_parts
from bowline.families.transformers_table import load_table


@rule("BW406", "wrapped-names", Severity.ERROR, also=Severity.WARNING)
def wrapped_names(evidence: Evidence) -> Iterator[Observation]:
    """Tensor names have a part that a training wrapper added, so loaders do not find the tensors.

    What: names have a segment such as `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `_orig_mod.` or
    `module.`, or a prefix in front of the names that the class has. The message says how many tensors have it. This is
    seen from the names alone, and the tie can be intact: often only the layers are wrapped.

    Why it hurts: transformers does not find these tensors and draws the weights at random, which it says in its load
    report and nowhere else. The finding is a warning if the class is unknown, since its own code may use such names.

    Example: `torch.save(model.state_dict(), path)` for a model whose layers are compiled or wrapped by FSDP.

    Fix: save the inner module's state dict. Or load with `bowline.nn.load_checkpoint(model, path, strip="_orig_mod.")`
    and save with `bowline.nn.save_checkpoint`. If PEFT added the part, merge the adapter and save again.

    Reported in: pytorch/pytorch#101107, FareedKhan-dev/train-llm-from-scratch#36

    """
    declaration = evidence.declaration
    ends = (end for one in evidence.ties for end in (one.tie.target, one.tie.source))
    own = {name for name in (declaration.embedding, declaration.head, *ends) if name} if declaration.loaders else set()
    facts = load_table().architecture(declaration.architecture or "")
    prefix = f"{facts.prefix}." if facts is not None and facts.prefix else ""
    known = bool(declaration.loaders)
    for part in added_parts(evidence.tensors, own, prefix):
        if own or part.text != "module." or all(name.startswith("module.") for name in evidence.tensors):
            yield Observation(
                message=_message(part, len(evidence.tensors), known=known),
                help=(
                    "merge the adapter into the model, and save the merged model"
                    if part.is_adapter
                    else "save the inner module's state dict; or load with "
                    f"bowline.nn.load_checkpoint(..., strip={part.text!r}) and save again"
                ),
                tensors=part.names[:8],
                severity=None if known else Severity.WARNING,
            )


def _message(part: AddedPart, tensors: int, *, known: bool) -> str:
    added = f", which {part.wrapper} adds" if part.wrapper else ""
    if known:
        harm = f"transformers does not find {'it' if len(part.names) == 1 else 'them'} and draws the weights at random"
    else:
        harm = "a loader finds them only if the class itself has such names"
    return (
        f"{len(part.names)} of {tensors} tensor names have the part {shown(part.text)}{added} "
        f"(for example {shown(part.names[0])}): {harm}"
    )
