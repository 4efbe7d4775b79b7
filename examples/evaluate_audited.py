"""The perplexity of a causal language model on a text, refused if an audit of the checkpoint finds an error.

    python examples/evaluate_audited.py DIR --text FILE

A loader can draw a missing head at random, or drop a trained one, and an evaluation then measures another model. So the
audit comes first, and the model is not loaded if a finding is an error. Warnings are printed. Exit code: 0 with the
perplexity, 1 if the checkpoint is refused, 2 if checkpoint or text cannot be read.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import bowline
from bowline.errors import BowlineError


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with a checkpoint and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="the text to predict")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window; windows do not overlap")
    return parser.parse_args()


def is_sound(directory: str) -> bool:
    """Whether the audit finds no error; what it finds is printed."""
    findings = [finding for finding in bowline.audit(directory).findings if finding.severity != "info"]
    for finding in findings:
        print(f"{finding.severity} {finding.code}: {finding.message}", file=sys.stderr)
    return not any(finding.severity == "error" for finding in findings)


def perplexity(directory: str, text: str, length: int) -> tuple[float, int]:
    """The exponential of the mean loss, and the number of tokens that were predicted."""
    import torch  # here and not above: the audit needs neither torch nor transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(directory)(text)["input_ids"])
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in ids.split(length):
            if len(window) > 1:
                loss = model(input_ids=window[None], labels=window[None]).loss
                total += float(loss) * (len(window) - 1)
                count += len(window) - 1
    return (math.exp(total / count), count) if count else (math.nan, 0)


def main() -> int:
    """Audits, then evaluates."""
    given = options()
    try:
        text = given.text.read_text(encoding="utf-8")
        if not is_sound(given.model):
            print(f"error: {given.model}: not evaluated, because its audit found an error", file=sys.stderr)
            return 1
    except (OSError, UnicodeDecodeError, BowlineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    value, count = perplexity(given.model, text, given.length)
    if count == 0:
        print(f"error: {given.text}: expected two tokens or more", file=sys.stderr)
        return 2
    print(f"perplexity {value:.6f} of {count} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
