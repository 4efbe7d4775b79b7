"""`python -m benchmarks NAME [--write]`: run one benchmark; with `--write`, keep its dated result."""

from __future__ import annotations

import argparse
import importlib
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("__init__", "__main__", "measure"))


def main() -> int:
    """Run the benchmark that was named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    text: str = importlib.import_module(f"benchmarks.{arguments.name}").run()
    print(text)
    if arguments.write:
        results = HERE / "results"
        results.mkdir(exist_ok=True)
        (results / f"{arguments.name}-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text + "\n")
    return 0


sys.exit(main())
