"""Rules about the config, the class and the tokenizer's files: whether they can be read and are known."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.checkpoint.lint import LintKind


@rule("BW401", "config-malformed", Severity.ERROR)
def config_malformed(evidence: Evidence) -> Iterator[Observation]:
    """`config.json` cannot be read.

    What: it is not JSON, or not an object.

    Why it hurts: no loader can build the model. The other findings are inferred from names and shapes.

    Example: an edit by hand left a trailing comma.

    Fix: correct the file, or fetch it again.
    """
    for lint in evidence.lints:
        if lint.kind is LintKind.CONFIG_MALFORMED:
            yield Observation(message=lint.message, help="correct the file, or fetch it again", file="config.json")


@rule("BW402", "config-missing", Severity.WARNING)
def config_missing(evidence: Evidence) -> Iterator[Observation]:
    """The weights have no `config.json` beside them.

    What: without a config, the findings are based on names and shapes alone.

    Why it hurts: nothing says whether the model is tied; every loader needs the config.

    Example: a lone `model.safetensors`.

    Fix: put the config beside the weights.
    """
    for lint in evidence.lints:
        if lint.kind is LintKind.CONFIG_MISSING:
            yield Observation(message=lint.message, help="put config.json beside the weights")


@rule("BW403", "inferred", Severity.INFO)
def inferred(evidence: Evidence) -> Iterator[Observation]:
    """The class is unknown, so its ties are inferred.

    What: `architectures` is absent, or names a class that is in neither of the two versions of transformers that
    Bowline knows. The embedding and the head were found by their names and shapes.

    Why it hurts: it does no harm by itself. But the inferred ties may be wrong, and with remote code the loader's
    behaviour depends on that code.

    Example: a model with its own `modeling_*.py`.

    Fix: none is needed; check in the class's own code which tensors it ties.
    """
    declaration = evidence.declaration
    if declaration.inferred and evidence.config is not None:
        found = ", ".join(str(tie.tie) for tie in evidence.ties) or "no tie"
        stated = evidence.config.get("architectures")
        known = f"Bowline does not know {declaration.architecture}" if stated else "config.json names no class"
        taken = f"; treated as {declaration.architecture}" if not stated and declaration.architecture else ""
        yield Observation(
            message=f"{known}{taken}; inferred from names and shapes: {found}",
            help="check in the class's own code which tensors it ties",
            file="config.json",
        )


@rule("BW404", "tokenizer-malformed", Severity.WARNING)
def tokenizer_malformed(evidence: Evidence) -> Iterator[Observation]:
    """A tokenizer file cannot be read.

    What: `tokenizer.json`, `added_tokens.json`, `vocab.json`, `special_tokens_map.json` or `tokenizer_config.json` is
    not JSON, `tokenizer.model` is not a SentencePiece model, or `vocab.txt` is not UTF-8.

    Why it hurts: the tokenizer will not load, and the audit could not compare its ids with the table.

    Example: a Git LFS pointer in place of the file.

    Fix: fetch the file again.
    """
    for file, problem in evidence.tokenizer.problems.items() if evidence.tokenizer else ():
        yield Observation(message=problem, help="fetch the file again", file=file)


@rule("BW408", "generation-config-malformed", Severity.WARNING)
def generation_config_malformed(evidence: Evidence) -> Iterator[Observation]:
    """`generation_config.json` cannot be read.

    What: it is not JSON, or not an object.

    Why it hurts: transformers ignores a file that is not JSON and generates with the defaults of `config.json`, so the
    padding, end and sampling that the file states are lost. It fails with a TypeError where the file holds JSON that is
    not an object. The audit could not compare the file's special ids with the tokenizer's.

    Example: a Git LFS pointer in place of the file.

    Fix: fetch the file again, or remove it.
    """
    if evidence.generation_problem is not None:
        yield Observation(
            message=evidence.generation_problem,
            help="fetch the file again, or remove it",
            file="generation_config.json",
        )


@rule("BW409", "config-outside", Severity.WARNING)
def config_outside(evidence: Evidence) -> Iterator[Observation]:
    """`config.json` is a link that leads out of the checkpoint.

    What: the link's target is outside the directory, and outside the Hub's cache of the same repository. The audit
    reads it, as every loader does.

    Why it hurts: a copy of the directory has no config, or another one, and whoever writes the target changes the
    model.

    Example: a directory of experiments whose configs are links to one file.

    Fix: put the file itself into the directory.
    """
    for lint in evidence.lints:
        if lint.kind is LintKind.CONFIG_OUTSIDE:
            yield Observation(message=lint.message, help="put the file itself into the directory", file="config.json")
