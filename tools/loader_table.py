"""Writes what each loader makes of a head into `docs/loaders.md`, between its marks: `python -m tools.loader_table`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bowline.auditing import audit
from bowline.auditing.loaders import LOADERS, loaders_run
from bowline.demo import layouts
from bowline.demo.layouts import Layout
from bowline.families.loader_tables import loader_table

__all__ = ["PAGE", "updated"]

PAGE = Path(__file__).parent.parent / "docs" / "loaders.md"
BEGIN, END = "<!-- loaders: generated -->\n", "<!-- end -->"
FLAG = "tie_word_embeddings"
HEAD = "lm_head.weight"
FAMILIES = {
    "LlamaForCausalLM": (layouts.llama, "model.embed_tokens.weight"),
    "GPT2LMHeadModel": (layouts.gpt2, "transformer.wte.weight"),
    "T5ForConditionalGeneration": (layouts.t5_v1_0, "shared.weight"),
}
"""By class: a checkpoint of it, and the name of its embedding."""
ROWS = 256
"""Rows of the vocabulary: fewer are sooner audited."""
SHOWN = tuple(loader for loader in LOADERS if loader != "vllm-0.28")
"""The loaders of the table; vLLM before 0.29 has a section of its own."""


def states(model: Layout, source: str) -> Iterator[tuple[str, Layout]]:
    """The model in each state of its head and its flag, with a name."""
    table = model.tensor(source)[:ROWS]
    model = model.with_tensor(source, table).with_config(vocab_size=ROWS)
    stored = {"not stored": None, "stored, equal": table, "stored, another": table[::-1].copy()}
    bare = {key: value for key, value in model.config.items() if key != FLAG}
    for head, value in stored.items():
        with_head = model.without_tensor(HEAD) if value is None else model.with_tensor(HEAD, value)
        for flag in (True, False, None):
            stated = bare if flag is None else {**bare, FLAG: flag}
            word = "absent" if flag is None else str(flag).lower()
            yield f"{head} | {word}", Layout(config=stated, files=with_head.files)


def fates(layout: Layout) -> list[str]:
    """What each loader makes of the head."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "checkpoint")
        layout.write(place)
        outcomes = audit(place).evidence.outcomes
    found = [outcomes[loader][HEAD] for loader in SHOWN]
    return [outcome.fate.value if outcome is not None else "not known" for outcome in found]


def table() -> str:
    """The tables of all families."""
    run = loaders_run()
    lines = []
    for architecture, (model, source) in FAMILIES.items():
        lines += [
            f"### {architecture}",
            "",
            f"| head | flag | {' | '.join(run[loader] for loader in SHOWN)} |",
            f"|{'---|' * (len(SHOWN) + 2)}",
            *(f"| {state} | {' | '.join(fates(layout))} |" for state, layout in states(model(), source)),
            "",
        ]
    before = ", ".join(f"`{name}`" for name in loader_table("vllm")["before_0_29"]["run"])
    return "\n".join([*lines, f"Classes that were run in {run['vllm-0.28']}: {before}.", ""])


def updated(page: str) -> str:
    """The page with its tables made again."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected the marks {BEGIN.strip()} and {END}")
    return f"{before}{begin}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
