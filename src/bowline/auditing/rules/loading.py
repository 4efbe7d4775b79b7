"""Rules about tensors that the class will not find: they are stored under other names than its own, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.formats.wrapper_names import AddedPart, added_parts
from bowline.families.transformers_table import load_table
from bowline.wording import listed

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
STACKS = ("layers", "layer", "h", "blocks", "block")
MOST_LAYERS = 10_000


@rule("BW406", "wrapped-names", Severity.ERROR, also=Severity.WARNING)
def wrapped_names(evidence: Evidence) -> Iterator[Observation]:
    """Tensor names have a part that a training wrapper added, so loaders do not find the tensors.

    What: names have a segment such as `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `_orig_mod.` or
    `module.`, or a prefix in front of the names that the class has. The message says how many tensors have it. This is
    seen from the names alone, and the tie can be intact: often only the layers are wrapped.

    Why it hurts: transformers does not find these tensors and draws the weights at random, which it says in its load
    report and nowhere else. The finding is a warning if the class is unknown, since its own code may use such names,
    and if the part is the model's own prefix once more (`model.model.`), which transformers 5 removes and version 4
    does not.

    Example: `torch.save(model.state_dict(), path)` for a model whose layers are compiled or wrapped by FSDP.

    Fix: save the inner module's state dict. Or load with `bowline.nn.load_checkpoint(model, path, strip="_orig_mod.")`
    and save with `bowline.nn.save_checkpoint`. If PEFT added the part, merge the adapter and save again. If the names
    have `weight_orig` or `original`, remove the pruning or the parametrization from the model and save again.

    Reported in: pytorch/pytorch#101107, FareedKhan-dev/train-llm-from-scratch#36

    """
    declaration = evidence.declaration
    ends = (end for one in evidence.ties for end in (one.tie.target, one.tie.source))
    own = {name for name in (declaration.embedding, declaration.head, *ends) if name} if declaration.loaders else set()
    facts = load_table().architecture(declaration.architecture or "")
    prefix = f"{facts.prefix}." if facts is not None and facts.prefix else ""
    known = bool(declaration.loaders)
    if declaration.prefixed:
        yield Observation(
            message=(
                f"names begin with {shown(prefix)} once more than the class's (for example "
                f"{shown(min(declaration.prefixed))}): transformers 5 removes it, transformers 4 draws the weights at "
                "random, and vLLM, llama.cpp and mlx-lm refuse to load"
            ),
            help="load with transformers 5 and save again",
            tensors=tuple(sorted(declaration.prefixed))[:8],
            severity=Severity.WARNING,
        )
    for part in added_parts(evidence.tensors, own, prefix):
        if own or part.text != "module." or all(name.startswith("module.") for name in evidence.tensors):
            yield Observation(
                message=_message(part, len(evidence.tensors), known=known),
                help=(
                    "merge the adapter into the model, and save the merged model"
                    if part.is_adapter
                    else f"make the computed weights ordinary ones (with {part.wrapper}), and save again"
                    if part.is_computed
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


@rule("BW407", "layers-missing", Severity.ERROR)
def layers_missing(evidence: Evidence) -> Iterator[Observation]:
    """The config states more layers than the files hold.

    What: the config's number of layers is larger than the number of layers that are stored beside the embedding. This
    is seen from the names alone, in models with one stack of layers whose class is known.

    Why it hurts: transformers draws the missing layers at random, which it says in its load report and nowhere else.

    Example: one stage of a pipeline was saved as if it were the model, or layers were pruned and the config was not
    changed.

    Fix: fetch the missing tensors. If the layers were removed on purpose, write their number into config.json.
    """
    declaration, config = evidence.declaration, evidence.config
    stack = _stack(evidence.tensors, declaration.embedding or "")
    if config is None or not declaration.loaders or not evidence.complete or stack is None:
        return
    text = config.get("text_config")
    levels = [level for level in (config, text) if isinstance(level, dict)]
    stated = [(key, level[key]) for level in levels for key in LAYER_COUNTS if type(level.get(key)) is int]
    if len({count for _, count in stated}) != 1:
        return
    name, stored = stack
    key, count = stated[0]
    if not 0 < count <= MOST_LAYERS or max(stored) >= count:
        return
    missing = [str(at) for at in range(count) if at not in stored]
    if missing:
        yield Observation(
            message=(
                f"{key} is {count}, but {len(missing)} of the layers {shown(name + 'N')} "
                f"{'is' if len(missing) == 1 else 'are'} not stored ({listed(missing, 8)}): transformers draws "
                f"{'it' if len(missing) == 1 else 'them'} at random"
            ),
            help=f"fetch the missing tensors, or write {key}: {len(stored)} if the layers were removed on purpose",
            file="config.json",
        )


def _stack(names: Iterable[str], embedding: str) -> tuple[str, set[int]] | None:
    """The one stack of numbered layers beside the embedding, and the numbers in it; `None` without exactly one."""
    stacks: dict[str, set[int]] = {}
    for name in names:
        segments = name.split(".")
        for at, segment in enumerate(segments[1:], 1):
            if segment.isdecimal() and segments[at - 1] in STACKS:
                stacks.setdefault(".".join(segments[:at]) + ".", set()).add(int(segment))
                break
    parent = embedding
    while parent:
        parent = parent.rpartition(".")[0]
        near = {stack: numbers for stack, numbers in stacks.items() if not parent or stack.startswith(f"{parent}.")}
        if near:
            return next(iter(near.items())) if len(near) == 1 else None
    return None
