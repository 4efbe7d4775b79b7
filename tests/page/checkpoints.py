"""Checkpoints that pages are made of: a clean one, a broken one, and one whose every name is hostile."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.checkpoints import GPT2, HEAD, WTE, table, write

ROWS, WIDTH = 400, 32
HOSTILE_TOKENS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "\u202eevil\u202c",
    "\x1b[31mred",
    "x" * 1_000_000,
    "a\nb",
    '</script><script>document.title="changed"</script>',
    "${alert(3)}",
    "&lt;b&gt;",
    "\u2028line",
    "{{7*7}}",
    "javascript:alert(4)",
    "\x00nul",
    "<!--",
    "-->",
    "]]>",
    "'",
    "http://example.com/x.png",
)
HOSTILE_CLASS = "<b onmouseover=alert(1)>\u202eGPT2LMHeadModel</b>\x1b[31m" + "y" * 5000
ADDED = (ROWS - 10, ROWS - 5)


def tokens(first: tuple[str, ...] = ()) -> list[str]:
    return [*first, *(f"\u2581word{number}" for number in range(ROWS - len(first)))]


def tokenizer(texts: list[str]) -> dict[str, object]:
    added = [{"id": number, "content": texts[number], "special": True} for number in range(*ADDED)]
    return {
        "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(texts)}},
        "added_tokens": added,
    }


def clean(directory: Path) -> Path:
    """One matrix, stored once."""
    config = {**GPT2, "vocab_size": ROWS, "pad_token_id": 3, "eos_token_id": 0}
    return write(directory, {WTE: table(ROWS, WIDTH)}, config, files={"tokenizer": tokenizer(tokens())})


def broken(directory: Path) -> Path:
    """A head that differs in some rows under a flag that says tied, with rows of zeros and one that is not finite."""
    embedding = table(ROWS, WIDTH)
    head = embedding.copy()
    head[100:150] *= np.float32(1.25)
    head[7] = np.nan
    head[-4:] = 0
    config = {**GPT2, "vocab_size": ROWS, "pad_token_id": 3, "eos_token_id": 0}
    return write(directory, {WTE: embedding, HEAD: head}, config, files={"tokenizer": tokenizer(tokens())})


def hostile(directory: Path) -> Path:
    """Tokens, the class and the flag's neighbours hold HTML, controls, and texts of a million characters."""
    config = {
        **GPT2,
        "architectures": [HOSTILE_CLASS],
        "vocab_size": ROWS,
        "pad_token_id": 3,
        "tie_word_embeddings": "<script>alert(5)</script>",
    }
    tensors = {
        WTE: table(ROWS, WIDTH),
        HEAD: table(ROWS, WIDTH, seed=1),
        "</script><img src=x onerror=alert(6)>": table(2, 2),
    }
    return write(directory, tensors, config, files={"tokenizer": tokenizer(tokens(HOSTILE_TOKENS))})
