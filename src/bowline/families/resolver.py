"""Turns a config and the tensors of a file into a `Declaration`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bowline.families.config_levels import config_levels
from bowline.families.declaration import Declaration, DeclaredTie, Flag, StatedSize
from bowline.families.name_patterns import infer_ties, infer_vocabulary
from bowline.families.transformers_table import ABSENT, ArchitectureFacts, Gate, Table, load_table, lookup
from bowline.tie import Tie, owner_chain

__all__ = ["FLAG", "FLAGS", "Shapes", "Spelling", "architecture_of", "resolve", "stated_levels", "stated_size"]

FLAG = "tie_word_embeddings"
FLAGS = (FLAG, "tie_embedding")
"""The flag, and the name that one family has for it. Other keys that decide ties also decide something else."""
VOCAB_SIZES = ("vocab_size", "text_config.vocab_size", "llm_config.vocab_size", "language_config.vocab_size", "n_vocab")
Shapes = Mapping[str, tuple[int, ...]]


def resolve(config: Mapping[str, Any] | None, shapes: Shapes, table: Table | None = None) -> Declaration:
    """Find what the class in `config["architectures"]` declares, by the names that `shapes` (name to shape) uses.

    The ties of a class that the table lacks are inferred from names and shapes; `inferred` is then true.

    Example:
        >>> config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257}
        >>> declaration = resolve(config, {"wte.weight": (50257, 768)})
        >>> print(declaration.ties[0].tie, declaration.flag.value)
        lm_head.weight <- wte.weight True
    """
    table = table or load_table()
    config = config or {}
    stated_class = _stated_architecture(config)
    architecture = architecture_of(config, shapes, table)
    if architecture is None:
        return _unknown(config, shapes, table, stated_class)
    inferred = architecture.name != stated_class
    return _known(architecture, config, shapes, table, stated_class, inferred=inferred)


def architecture_of(config: Mapping[str, Any], shapes: Shapes, table: Table | None = None) -> ArchitectureFacts | None:
    """The class that the config names, else the one of its family that fits the tensors; `None` if it is unknown."""
    table = table or load_table()
    stated_class = _stated_architecture(config)
    architecture = table.architecture(stated_class) if stated_class else None
    model_type = config.get("model_type")
    if architecture is None and isinstance(model_type, str) and "auto_map" not in config:  # an older spelling, or none
        architecture = _best_of_family(model_type, shapes, table)
    return architecture


def stated_levels(config: Mapping[str, Any]) -> dict[str, bool]:
    """Every level of a config that states the flag: dotted path to value, outermost first.

    Example:
        >>> stated_levels({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}})
        {'tie_word_embeddings': True, 'text_config.tie_word_embeddings': False}
    """
    return {path: bool(value) for path, value in _levels(config)}


def _not_boolean(config: Mapping[str, Any]) -> dict[str, object]:
    return {path: value for path, value in _levels(config) if not isinstance(value, bool)}


def _levels(config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for keys, level in config_levels(config):
        if FLAG in level:
            yield ".".join((*keys, FLAG)), level[FLAG]


def _stated_architecture(config: Mapping[str, Any]) -> str | None:
    stated = config.get("architectures")
    return stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else None


def _known(
    architecture: ArchitectureFacts,
    config: Mapping[str, Any],
    shapes: Shapes,
    table: Table,
    stated_class: str | None,
    *,
    inferred: bool,
) -> Declaration:
    family = table.family(architecture.family)
    spell = Spelling(architecture, shapes)
    newest = architecture.newest
    head = spell(newest.head) if newest.head else None
    ties, made = _declared_ties(architecture, config, spell)
    ties = tuple(sorted(ties, key=lambda declared: declared.tie.target != head))  # the head's before the others'
    main = next((tie for tie in ties if tie.tie.target == head), ties[0] if ties else None)
    levels = stated_levels(config)
    vocab_size = stated_size(config, family.vocab_size if family else None)
    axes, lengths = _vocabulary(architecture, config, spell, vocab_size)
    return Declaration(
        architecture=stated_class or architecture.name,
        family=architecture.family,
        inferred=inferred,
        ties=ties,
        made=made,
        flag=main.flag if main else _unused_flag(levels),
        embedding=spell(newest.embedding) if newest.embedding else None,
        head=head,
        vocabulary={name: axis for name, axis in axes.items() if name in shapes},
        expected_lengths=lengths,
        vocab_size=vocab_size,
        hidden_size=stated_size(config, family.hidden_size if family else None),
        levels=levels,
        not_boolean=_not_boolean(config),
        loaders=frozenset(architecture.declared),
        prefixed=frozenset(spell.prefixed),
    )


def _declared_ties(
    architecture: ArchitectureFacts, config: Mapping[str, Any], spell: Spelling
) -> tuple[tuple[DeclaredTie, ...], dict[str, tuple[Tie, ...]]]:
    """List one tie for each target, as the newest version that declares it does, and the ties that each version makes.

    An older version may hang the same tensors on another owner (`shared` on the decoder's table, not the other way
    round). Both are the same shared matrix, so the tie is listed once; `made` has it as each version makes it. If a
    tie's source is the target of another tie that is made (a <- b, b <- c), it is listed with the owner at the end of
    the chain.
    """
    listed: dict[str, Tie] = {}
    gates: dict[str, dict[str, Gate]] = {}
    made: dict[str, tuple[Tie, ...]] = {}
    for loader in sorted(architecture.declared, reverse=True):
        asked = []
        for declared in architecture.declared[loader].ties:
            tie, gate = Tie(spell(declared.tie.target), spell(declared.tie.source)), declared.gate_in(config)
            if tie.target == tie.source:
                continue
            if gate.decide(config)[0]:
                kept = declared.keeps_target and tie.target in spell.shapes
                asked.append(Tie(tie.source, tie.target) if kept else tie)
            backwards = listed.get(tie.source)
            knot = backwards if backwards is not None and backwards.source == tie.target else tie
            listed.setdefault(knot.target, knot)
            gates.setdefault(knot.target, {})[loader] = gate
        made[loader] = _from_roots(asked)
    ties = [_declared_tie(tie, gates[target], config, architecture) for target, tie in listed.items()]
    chain = {one.tie.target: one.tie.source for one in ties if one.asked[max(gates[one.tie.target])]}
    return tuple(replace(one, tie=Tie(one.tie.target, owner_chain(one.tie.source, chain)[-1])) for one in ties), made


def _from_roots(asked: Sequence[Tie]) -> tuple[Tie, ...]:
    """The same ties, each with the owner at the end of its chain as its source (a <- b, b <- c: both from c)."""
    chain = {tie.target: tie.source for tie in asked}
    rooted = (Tie(tie.target, owner_chain(tie.source, chain)[-1]) for tie in asked)
    return tuple(tie for tie in rooted if tie.source != tie.target)


def _declared_tie(
    tie: Tie, gates: Mapping[str, Gate], config: Mapping[str, Any], architecture: ArchitectureFacts
) -> DeclaredTie:
    decisions = {loader: gate.decide(config) for loader, gate in gates.items()}
    return DeclaredTie(
        tie=tie,
        flag=_flag(gates, decisions),
        asked={loader: decisions.get(loader, (False, None))[0] for loader in architecture.declared},
        paths=tuple(dict.fromkeys(path for gate in gates.values() for path in gate.paths)),
        unconditional=frozenset(loader for loader, gate in gates.items() if not gate.paths),
    )


def _vocabulary(
    architecture: ArchitectureFacts, config: Mapping[str, Any], spell: Spelling, vocab_size: StatedSize | None
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The vocabulary axis of each tensor that has one, and its length in each version if the config states the size."""
    axes: dict[str, int] = {}
    lengths: dict[str, dict[str, int]] = {}
    for loader in sorted(architecture.declared):  # the newest last: it overrides the others
        declared = architecture.declared[loader]
        axes |= {spell(name): axis for name, axis in declared.vocabulary.items()}
        lengths[loader] = {}
        sizes = [(vocab_size, declared.vocabulary)]
        for path, names in declared.other_vocabularies.items():
            axes |= {spell(name): axis for name, axis in names.items() if spell(name) not in axes}
            sizes.append((stated_size(config, path), names))
        for size, names in sizes:
            for name in names:
                excess = declared.longer.get(name, 0)
                if size is not None and excess is not None:
                    lengths[loader].setdefault(spell(name), size.value + excess)
    return axes, lengths


def _flag(gates: Mapping[str, Gate], decisions: Mapping[str, tuple[bool, str | None]]) -> Flag:
    """Choose one flag from the loaders': a stated key before a default, a newer loader before an older one."""
    newest_first = sorted(decisions, reverse=True)
    for loader in newest_first:
        value, path = decisions[loader]
        if path is not None:
            return Flag(value=value, path=path)
    governed = [loader for loader in newest_first if gates[loader].paths] or newest_first
    values = {decisions[loader][0] for loader in governed}
    return Flag(value=values.pop() if len(values) == 1 else None, path=None)


def _unused_flag(levels: Mapping[str, bool]) -> Flag:
    path, value = next(iter(levels.items()), (None, None))
    return Flag(value=value, path=path)


class Spelling:
    """Finds how a file spells a name of the table: the same, as the live module does, or with another prefix.

    `prefixed` has the spellings that begin with the model's own prefix once more than the class's names.
    """

    def __init__(self, architecture: ArchitectureFacts, shapes: Shapes) -> None:
        self._prefix = architecture.prefix + "." if architecture.prefix else ""
        self._declared = [architecture.declared[loader] for loader in sorted(architecture.declared, reverse=True)]
        self._has_prefix = bool(self._prefix) and any(
            name.startswith(self._prefix) for declared in self._declared for name in declared.vocabulary
        )
        self.shapes = shapes
        self.prefixed: set[str] = set()
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name not in self._known:
            spelled = next((spelled for spelled in self._candidates(name) if spelled in self.shapes), name)
            if self._has_prefix and spelled == self._prefix + name:
                self.prefixed.add(spelled)
            self._known[name] = spelled
        return self._known[name]

    def _candidates(self, name: str) -> Iterator[str]:
        names = [name, *(declared.module_names[name] for declared in self._declared if name in declared.module_names)]
        yield from names
        if self._prefix:
            for one in names:
                yield one.removeprefix(self._prefix) if one.startswith(self._prefix) else self._prefix + one
            for one in names:
                yield self._prefix + one


def _best_of_family(family: str, shapes: Shapes, table: Table) -> ArchitectureFacts | None:
    """The class of the family that has the most vocabulary tensors in the file; with a tie before without."""
    best: tuple[tuple[int, bool, int, int], ArchitectureFacts] | None = None
    for name in table.architectures_of(family):
        architecture = table.architecture(name)
        assert architecture is not None
        declared = architecture.newest
        spell = Spelling(architecture, shapes)
        found = sum(spell(tensor) in shapes for tensor in declared.vocabulary)
        if found:
            score = (found, bool(declared.ties), -len(declared.vocabulary), -len(name))
            if best is None or score > best[0]:
                best = (score, architecture)
    return best[1] if best else None


def _unknown(config: Mapping[str, Any], shapes: Shapes, table: Table, stated_class: str | None) -> Declaration:
    levels = stated_levels(config)
    vocab_size = next((size for path in VOCAB_SIZES if (size := stated_size(config, path))), None)
    embedding, head, head_name = infer_ties(shapes, vocab_size.value if vocab_size else None, stated_class)
    path, value = next(iter(levels.items()), (None, None))
    ties: tuple[DeclaredTie, ...] = ()
    made: dict[str, tuple[Tie, ...]] = {}
    if embedding and head_name:
        asked = (
            {"transformers-4": True, "transformers-5": False} if value is None else dict.fromkeys(table.versions, value)
        )
        flag = Flag(value=value, path=path)
        ties = (DeclaredTie(tie=Tie(head_name, embedding), flag=flag, asked=asked, paths=(path or FLAG,)),)
        made = {loader: (ties[0].tie,) if wanted else () for loader, wanted in asked.items()}
    model_type = config.get("model_type")
    return Declaration(
        architecture=stated_class,
        family=model_type if isinstance(model_type, str) else None,
        inferred=True,
        ties=ties,
        made=made,
        flag=Flag(value=value, path=path),
        embedding=embedding,
        head=head,
        vocabulary=infer_vocabulary(shapes, embedding, head),
        expected_lengths={},
        vocab_size=vocab_size,
        hidden_size=None,
        levels=levels,
        not_boolean=_not_boolean(config),
        loaders=frozenset(),
    )


def stated_size(config: Mapping[str, Any], path: str | None) -> StatedSize | None:
    """The size at this path, or at the top in a config of an older layout, which has no `text_config`."""
    value = lookup(config, path) if path else ABSENT
    if value is ABSENT and path and path.startswith("text_config.") and "text_config" not in config:
        path = path.removeprefix("text_config.")  # an older layout, with the text model's keys at the top
        value = lookup(config, path)
    if isinstance(value, int) and not isinstance(value, bool):
        return StatedSize(path=str(path), value=value)
    return None
