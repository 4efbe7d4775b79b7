"""Facts about every model class of the transformers version that runs this file, as JSON.

    python -m tools.inspect_transformers names.json
    python -m tools.inspect_transformers facts.json CLASS ...

Nothing is read from source text. Each class is built tiny, many times: once per vocabulary key, to see which axes
follow it; once per combination of flags, to see which ties are made; and once for real, with every tie broken and every
tensor given its own values, to see under which names `save_pretrained` writes them. `tools.inspection` does the work;
it needs torch, transformers and safetensors, and not Bowline.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers

from tools.inspection.class_facts import inspect
from tools.tiny import candidate_names


def main() -> None:
    """Write the facts of the classes named after the path given first; with only a path, the names of all classes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL + 1)
    transformers.logging.disable_progress_bar()
    destination, *names = sys.argv[1:]
    content = inspect(names) if names else candidate_names()
    Path(destination).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
