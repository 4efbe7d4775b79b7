"""The result of an adapter's audit: its evidence, its findings, and the record that the JSON report holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bowline.auditing.adapter_evidence import AdapterDelta, AdapterEvidence, DeltaKind, End, Merge, TiedModule
from bowline.auditing.adapter_merge import PEFT, PEFT_RUN, TRANSFORMERS_RUN
from bowline.auditing.audit_report import finding_record, findings_html
from bowline.auditing.rules import Finding, Severity
from bowline.checkpoint.formats.peft_adapter import LORA
from bowline.checkpoint.formats.strict_json import shown
from bowline.wording import joined

__all__ = ["AdapterReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """The evidence of one adapter and the findings about it."""

    evidence: AdapterEvidence
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether there are no findings, or only informational ones."""
        return all(finding.severity is Severity.INFO for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The adapter in a sentence: what it is, for which base, which ends it trains, and whether the base is tied."""
        evidence = self.evidence
        base = evidence.adapter.config.base
        named = shown(base) if base else "a base that it does not name"
        return f"{_kind(evidence)} for {named} {_trains(evidence)}; {_tied(evidence)}"

    def _repr_html_(self) -> str:
        """The sentence and a table of the findings, as a notebook shows it."""
        return findings_html(self.evidence.location, self.sentence, self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The entry of this adapter in the JSON report; the schema is in `docs/audit.schema.json`."""
        evidence = self.evidence
        config, base = evidence.adapter.config, evidence.base
        return {
            "path": evidence.location,
            "sentence": self.sentence,
            "peft_type": config.peft_type,
            "peft_version": config.peft_version,
            "file": evidence.adapter.file,
            "rank": config.rank,
            "alpha": config.alpha,
            "values_read": evidence.values_read,
            "base": {
                "stated": config.base,
                "path": base.location if base.evidence is not None else None,
                "architecture": base.architecture,
                "tied": base.tied,
                "reason": base.reason,
            },
            "ends": [_end(place, evidence.deltas) for place in base.places],
            "alike": evidence.alike,
            "elsewhere": dict(evidence.elsewhere),
            "merges": [_merge(merge) for merge in evidence.merges],
            "tensors": [
                {
                    "name": tensor.name,
                    "part": tensor.part.name.lower(),
                    "module": tensor.module,
                    "attribute": tensor.attribute,
                    "end": place.end.value if (place := base.find(tensor.module)) is not None else None,
                    "shape": list(tensor.stored.shape),
                    "dtype": tensor.stored.dtype,
                }
                for tensor in evidence.adapter.tensors
            ],
            "findings": [finding_record(finding) for finding in self.findings],
        }


def _kind(evidence: AdapterEvidence) -> str:
    config = evidence.adapter.config
    if config.peft_type != LORA:
        return f"an adapter of PEFT's {config.peft_type}"
    kinds = {delta.kind for delta in evidence.deltas}
    name = "rank-stabilised LoRA" if config.use_rslora else "LoRA"
    return f"a {'DoRA' if config.use_dora or DeltaKind.DORA in kinds else name} adapter"


def _trains(evidence: AdapterEvidence) -> str:
    deltas = evidence.deltas
    if evidence.rows_of_all_ends:
        return f"trains {deltas[0].count} rows of the matrix that embedding and head share ({deltas[0].place.module})"
    by_end = {end: [delta for delta in deltas if delta.place.end is end] for end in End}
    modules = {end: joined(list(dict.fromkeys(delta.place.module for delta in found))) for end, found in by_end.items()}
    if not deltas:
        return "does not train the embedding" if evidence.base.headless else "trains neither the embedding nor the head"
    if all(by_end.values()):
        return f"trains the embedding ({modules[End.EMBEDDING]}) and the head ({modules[End.HEAD]})"
    if evidence.base.headless is not None:
        return f"trains the embedding ({modules[End.EMBEDDING]})"
    here, other = (End.EMBEDDING, End.HEAD) if by_end[End.EMBEDDING] else (End.HEAD, End.EMBEDDING)
    return f"trains the {here.value} ({modules[here]}) and not the {other.value}"


def _tied(evidence: AdapterEvidence) -> str:
    base = evidence.base
    if base.headless is not None:
        return f"the model that it adapts ({base.headless}) has no output head"
    if base.tied is None:
        return f"whether the base is tied is not known ({base.reason}): give it with --base"
    return "the base is tied" if base.tied else "the base is not tied"


def _end(place: TiedModule, deltas: tuple[AdapterDelta, ...]) -> dict[str, Any]:
    delta = next((one for one in deltas if one.place is place), None)
    return {
        "module": place.module,
        "end": place.end.value,
        "trained": delta.kind.name.lower() if delta is not None else None,
        "rank": delta.rank if delta is not None else None,
        "scaling": delta.scaling if delta is not None else None,
        "rows": len(delta.rows) if delta is not None and delta.rows is not None else None,
        "loaded": delta.loaded if delta is not None else None,
    }


def _merge(merge: Merge) -> dict[str, Any]:
    peft = merge.tool == PEFT
    return {
        "tool": merge.tool,
        "version_run": f"peft {PEFT_RUN}, transformers {TRANSFORMERS_RUN}" if peft else None,
        "tied_base": merge.tied_base,
        "tie_stays": merge.tie_stays,
        "exact": merge.exact,
        "ends": [
            {"module": each.place.module, "end": each.place.end.value, "holds": each.holds.name.lower()}
            for each in merge.ends
        ],
        "text": merge.text,
    }
