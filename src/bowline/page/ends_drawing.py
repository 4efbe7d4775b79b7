"""Draws the two ends of a model: one matrix or two, as stored and as each loader has them."""

from __future__ import annotations

from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.loaders import Outcome, loaders_run
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.page.elements import Child, Html, element
from bowline.page.panels.panel import data_table
from bowline.tie import TieState
from bowline.wording import byte_count

__all__ = ["loader_table", "stored_ends_drawing"]

SIGNS = {
    TieState.EQUAL: ("=", "equal, stored twice"),
    TieState.DIVERGED: ("≠", "different values"),
    TieState.INCOMPATIBLE: ("≠", "another shape or dtype"),
    None: ("?", "not compared"),
}
MISSING = (TieState.TARGET_MISSING, TieState.SOURCE_MISSING, TieState.BOTH_MISSING)
MEANINGS = {
    "tied": "one matrix at both ends",
    "kept": "two matrices, the head as stored",
    "dropped": "the stored head is ignored; the embedding takes its place",
    "random": "the head is drawn at random",
    "refused": "the checkpoint is not loaded",
    "unknown": "not known",
}
LONGEST_NAME = 60


def stored_ends_drawing(evidence: Evidence, tie: TieEvidence) -> Html:
    """The two ends as the files hold them: one box for one matrix, two for two, a dashed one for a missing end."""
    one = tie.state in (TieState.SHARED, TieState.ALIAS)
    if one:
        matrix = _box("one matrix, used at both ends", tie.source or tie.target, (tie.tie.source, tie.tie.target))
        inner: list[Child] = [_flow("token ids"), matrix, _flow("logits")]
    else:
        sign, words = SIGNS.get(tie.state, ("", "")) if tie.state not in MISSING else ("", "")
        source = _box("input embedding", tie.source, (tie.tie.source,), stored=tie.state not in MISSING[1:])
        target = _box("head", tie.target, (tie.tie.target,), stored=tie.state not in (MISSING[0], MISSING[2]))
        between = (
            element("div", element("b", sign, aria_hidden="true"), element("span", words), class_="sign")
            if sign
            else None
        )
        inner = [_flow("token ids"), source, between, target, _flow("logits")]
    return element("div", inner, class_="ends one" if one else "ends")


def loader_table(evidence: Evidence, tie: TieEvidence) -> Html | None:
    """A table of each loader's outcome for the tie; `None` if no loader is predicted."""
    ran, rows = loaders_run(), []
    for loader, targets in evidence.outcomes.items():
        outcome = targets.get(tie.tie.target)
        if outcome is None and loader == "vllm-0.28":
            continue  # few classes were run there
        rows.append((ran[loader], _glyph(outcome), _reason(outcome, evidence, tie)))
    if not rows:
        return None
    return data_table(f"What loaders make of {tie.tie.target}", ("loader", "its ends", "why"), rows, words=3)


def _reason(outcome: Outcome | None, evidence: Evidence, tie: TieEvidence) -> str:
    if outcome is not None:
        return outcome.reason
    declaration = evidence.declaration
    if tie.quantised is not None:
        return "depends on how it reads the quantised layout"
    known = declaration.loaders or evidence.gguf_file or not declaration.inferred
    return "depends on data that was not read" if known else "the class is not known"


def _glyph(outcome: Outcome | None) -> Html:
    """A small drawing of both ends in a loader, with its word."""
    fate = outcome.fate.value if outcome else "unknown"
    tone = {"tied": "good", "kept": "good", "dropped": "bad", "random": "bad", "refused": "bad"}.get(fate, "open")
    first = element("rect", x=2, y=5, width=22, height=22, rx=3, class_="stored")
    if fate == "tied":
        drawing = [element("rect", x=14, y=5, width=36, height=22, rx=3, class_="stored")]
    elif fate == "kept":
        drawing = [first, element("rect", x=40, y=5, width=22, height=22, rx=3, class_="stored other")]
    elif fate == "dropped":
        cross = element("path", d="M42 7L60 25M60 7L42 25", class_="cross")
        drawing = [first, element("rect", x=40, y=5, width=22, height=22, rx=3, class_="gone"), cross]
    elif fate == "random":
        noise = element("path", d="M44 12h3M51 9h3M56 15h3M46 19h3M53 22h3M43 24h2M58 21h2", class_="cross")
        drawing = [first, element("rect", x=40, y=5, width=22, height=22, rx=3, class_="gone"), noise]
    else:
        drawing = [element("rect", x=14, y=5, width=36, height=22, rx=3, class_="gone")]
    picture = element("svg", drawing, viewBox="0 0 64 32", width="64", height="32", aria_hidden="true")
    words = element("span", element("b", fate), element("br"), element("small", MEANINGS[fate]))
    return element("div", picture, words, class_=f"fate {tone}")


def _box(title: str, tensor: StoredTensor | None, names: tuple[str, ...], *, stored: bool = True) -> Html:
    facts = (
        f"{' by '.join(f'{size:,}' for size in tensor.shape)}, {tensor.dtype}, {byte_count(tensor.nbytes)}"
        if tensor
        else None
    )
    held = stored if tensor is None else True
    return element(
        "div",
        element("b", title),
        [element("code", _short(name)) for name in names],
        element("span", facts if facts else "not stored" if not held else "stored in another form"),
        class_="box" if held else "box gone",
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 2 :]}"


def _flow(word: str) -> Html:
    return element("span", word, class_="flow")
