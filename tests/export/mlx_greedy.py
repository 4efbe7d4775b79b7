"""Continues token ids greedily in mlx-lm: `python mlx_greedy.py MODEL COUNT ID...`, in an environment that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

model, _ = load_model(Path(sys.argv[1]))
tokens = [int(number) for number in sys.argv[3:]]
found: list[int] = []
for _ in range(int(sys.argv[2])):
    found.append(int(mx.argmax(model(mx.array([tokens + found]))[0, -1])))
sys.stdout.write(json.dumps(found))
