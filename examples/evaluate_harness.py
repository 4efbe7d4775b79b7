"""Tasks of lm-evaluation-harness on a checkpoint, refused if an audit of it finds an error.

    python examples/evaluate_harness.py DIR --tasks hellaswag,arc_easy

The audit is that of evaluate_audited.py: it comes before the model is loaded. Exit code: 0 with the table of results,
1 if the checkpoint is refused, 2 if it cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from bowline.errors import BowlineError
from evaluate_audited import is_sound


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with a checkpoint and its tokenizer")
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--include-path", help="a directory with tasks of your own")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="as the checkpoint's config says, or float32, bfloat16, ...")
    return parser.parse_args()


def main() -> int:
    """Audits, then evaluates."""
    given = options()
    try:
        if not is_sound(given.model):
            print(f"error: {given.model}: not evaluated, because its audit found an error", file=sys.stderr)
            return 1
    except BowlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import lm_eval  # here and not above: the audit needs none of it
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": given.model, "dtype": given.dtype},
        tasks=given.tasks.split(","),
        task_manager=TaskManager(include_path=given.include_path),
        limit=given.limit,
        device=given.device,
    )
    print(make_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
