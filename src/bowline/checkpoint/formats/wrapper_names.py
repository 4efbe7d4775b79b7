"""Parts of tensor names that training wrappers add: find them by the names alone, and strip them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["ADAPTER_PARTS", "COMPUTED", "WRAPPERS", "AddedPart", "added_parts", "strip_name"]

WRAPPERS: dict[str, str] = {
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "module": "DataParallel, DistributedDataParallel or DeepSpeed",
    "base_layer": "a PEFT adapter that is not merged",
    "original_module": "PEFT's modules_to_save",
}
"""A wrapper keeps the module that it wraps under one of these attributes, so the name gets this segment."""
COMPUTED: dict[str, str] = {
    "weight_orig": "torch.nn.utils.prune",
    "original": "torch.nn.utils.parametrize",
}
"""A weight that a module computes from other tensors is stored as those, under names with such a segment.

Weight norm's `original0` and `original1` are not among them: classes of transformers have such names.
"""
ADAPTER_PARTS = ("base_layer", "original_module", "base_model.model")
"""The parts that mean an adapter: without them the names fit, but the adapter is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPart:
    """One part that does not belong to the model's own names, and the tensors whose names have it.

    `text` ends with a dot if it can be stripped. `wrapper` says where the part comes from; `None` for a prefix that no
    known wrapper adds.
    """

    text: str
    names: tuple[str, ...]
    wrapper: str | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether PEFT adds this part, so that stripping it would lose the adapter."""
        return any(part in self.text for part in ADAPTER_PARTS)

    @property
    def is_computed(self) -> bool:
        """Whether a module computes its weight from these tensors, so that stripping does not help."""
        return self.text in COMPUTED


def added_parts(names: Collection[str], own: Collection[str], prefix: str = "") -> tuple[AddedPart, ...]:
    """The wrapper segments in `names`, wherever they stand, and the prefix in front of the model's `own` names.

    `own`: all names of the model, or some of them, as embedding and head. A prefix counts only if it stands before an
    own name that `names` lacks. `prefix` is the one that loaders themselves add or remove.

    Example:
        >>> parts = added_parts(["model.layers.0._orig_mod.mlp.weight"], ["model.embed_tokens.weight"])
        >>> parts[0].text, len(parts[0].names), parts[0].wrapper
        ('_orig_mod.', 1, 'torch.compile')
        >>> [part.text for part in added_parts(["net.lm_head.weight"], ["lm_head.weight"])]
        ['net.']
    """
    real = {segment for name in own for segment in name.split(".")}
    words = [word for word in (*WRAPPERS, *(COMPUTED if own else ())) if word not in real]
    having: dict[str, list[str]] = {}
    bare: dict[str, str] = {}  # the name without wrapper segments: the name as it is stored
    for name in names:
        segments = name.split(".")
        found = [word for word in words if word in segments]
        for word in found:
            having.setdefault(word, []).append(name)
        bare[".".join(segment for segment in segments if segment not in found) if found else name] = name
    parts = [
        AddedPart(text=f"{word}.", names=tuple(having[word]), wrapper=WRAPPERS[word])
        if word in WRAPPERS
        else AddedPart(text=word, names=tuple(having[word]), wrapper=COMPUTED[word])
        for word in words
        if word in having
    ]
    before = _prefix(bare, own, prefix)
    if before:
        behind = tuple(name for short, name in bare.items() if short.startswith(before))
        wrapper = "PEFT's adapter model" if before.startswith("base_model.model.") else None
        parts.append(AddedPart(text=before, names=behind, wrapper=wrapper))
    return tuple(parts)


def _prefix(names: Collection[str], own: Collection[str], prefix: str) -> str | None:
    """The most frequent text before a name of `own` that `names` lacks."""
    found = {spelled for name in names for spelled in (name, name.removeprefix(prefix), prefix + name)}
    lacking = {name for name in own if name not in found}
    lacking |= {name.removeprefix(prefix) for name in lacking}
    counts: Counter[str] = Counter()
    for name in names if lacking else ():
        counts.update(before for before, rest in _splits(name) if rest in lacking)
    return min(counts, key=lambda text: (-counts[text], len(text))) if counts else None


def _splits(name: str) -> Iterator[tuple[str, str]]:
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1], name[at + 1 :]
        at = name.find(".", at + 1)


def strip_name(name: str, strip: Sequence[str]) -> str:
    """The name without the parts in `strip`: a wrapper's segment wherever it stands, any other text at the front.

    Example:
        >>> strip_name("module.layers.0._orig_mod.weight", ["_orig_mod", "module."])
        'layers.0.weight'
        >>> strip_name("net.net.weight", ["net."])
        'net.weight'
    """
    for part in strip:
        text = part.rstrip(".")
        if text in WRAPPERS:
            name = ".".join(segment for segment in name.split(".") if segment != text)
        else:
            name = name.removeprefix(f"{text}.")
    return name
