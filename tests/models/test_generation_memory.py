"""What a step of generation needs beside the model: logits of the last position, and no second table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bowline.models.common.kv_cache import KVCache

SIZE, WIDTH = 60000, 512
PROBE = """
import ctypes, gc, sys, torch
from bowline.models import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=int(sys.argv[1]), n_embd=int(sys.argv[2]), n_layer=1, n_head=4, n_positions=64,
                    bos_token_id=0, eos_token_id=None)
model = GPT2LMHeadModel(config).bfloat16().eval()
ids = torch.randint(1, config.vocab_size, (4, 16))

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

model.generate(ids, max_new_tokens=4, top_k=50, do_sample=True)
peaks = []
for _ in range(3):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    model.generate(ids, max_new_tokens=4, top_k=50, do_sample=True)
    peaks.append((status("VmHWM") - before) / 1024)
print(min(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_a_bf16_table_is_not_widened_for_the_last_position() -> None:
    command = [sys.executable, "-c", PROBE, str(SIZE), str(WIDTH)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    in_float32 = SIZE * WIDTH * 4 / 2**20
    assert float(done.stdout.splitlines()[-1]) < in_float32 / 4


def test_beams_keep_no_first_buffer_beside_the_rows_that_they_follow() -> None:
    cache, new = KVCache(layers=2), torch.randn(2, 1, 3, 4)
    with torch.no_grad():
        for layer in range(2):
            cache.update(layer, new, new)
    at = cache._layers[0][0].untyped_storage().data_ptr()
    assert cache._layers[1][1].untyped_storage().data_ptr() == at
    cache.reorder(torch.tensor([1, 0]))
    held = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    held += [tensor for pair in cache._layers.values() for tensor in pair]
    assert all(tensor.untyped_storage().data_ptr() != at for tensor in held)
    torch.testing.assert_close(cache._layers[0][0][:, :, :3], new[[1, 0]])
