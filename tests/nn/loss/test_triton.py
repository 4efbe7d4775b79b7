"""The Triton kernel without a GPU: interpreted on the CPU, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bowline.nn import kernels
from bowline.nn.loss import softmax
from bowline.nn.loss.options import Options
from bowline.nn.loss.resources import Resources

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".peers" / "triton"
COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bowline.nn.loss import triton_kernel

kinds = {"x": "*" + sys.argv[1], "banned": "*u8", "stride": "i32", "size": "i32", "labels": "*i64", "ignored": "i32"}
kinds |= dict.fromkeys(("of_loss", "of_lse", "losses", "lse", "own", "factor"), "*fp32")
kinds |= dict.fromkeys(("scale", "softcap", "z_loss", "share", "kept"), "fp32")
given = set(kinds) - {"banned", "of_lse", "scale", "softcap", "z_loss", "share"}
if sys.argv[3] == "everything":
    given = set(kinds)
signature, constants, aligned = {}, {}, {}
kernel = getattr(triton_kernel, sys.argv[4])
block, warps = (triton_kernel.BLOCK, 16) if kernel is triton_kernel._row else (triton_kernel.BLOCK_ONCE, 8)
for place, name in enumerate(kernel.arg_names):
    signature[name] = kinds[name] if name in given else "constexpr"
    if name not in given:
        constants[place,] = block if name == "BLOCK" else None
    elif kinds[name].startswith("*") or name == "stride":
        aligned[place,] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[2]), 32), options={"num_warps": warps})
print(json.dumps({"ptx": made.asm["ptx"], "binary": len(made.asm["cubin"])}))
"""

COMPILE_MULTIPLY = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bowline.nn import kernels

signature = {"x": "*bf16", "factor": "*fp32", "size": "i32", "BLOCK": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]}
source = ASTSource(kernels._multiply, signature, {(3,): kernels.BLOCK}, aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
"""


def run_with_triton(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: that Triton is there changes what others import."""
    if not (TRITON / "triton").is_dir():
        pytest.skip("triton is not unpacked in .peers/triton: see the Makefile")
    path = os.pathsep.join([str(TRITON), str(ROOT), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_interpreted_the_kernel_does_what_float64_does() -> None:
    """What is tested is in `interpreted.py`."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::RuntimeWarning",
    ]  # numpy's, of infinities
    done = run_with_triton("-m", "pytest", *options, "tests/nn/loss/interpreted.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability", "options"),
    [("_row", "bf16", "90", "none"), ("_row", "fp16", "80", "everything"), ("_powers", "bf16", "90", "none")],
)
def test_it_compiles_for_a_gpu_and_reads_and_writes_whole_vectors(
    kernel: str, dtype: str, capability: str, options: str, tmp_path: Path
) -> None:
    done = run_with_triton("-c", COMPILE, dtype, capability, options, kernel, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    ptx: str = made["ptx"]
    assert made["binary"] > 1000
    assert ptx.count("ld.global.v4") >= 4 and ptx.count("st.global.v4") >= 2
    alone = [line for line in ptx.splitlines() if "global.b16" in line or "global.b8" in line]
    assert len(alone) == (1 if options == "none" else 2), alone  # of the label, what it is and whether it is masked
    assert "cvt.rn." in ptx  # to the nearest
    assert ".local" not in ptx  # nothing is spilt that the program knows of


def test_the_kernel_that_multiplies_reads_no_gradient_where_the_factor_is_one(tmp_path: Path) -> None:
    done = run_with_triton("-c", COMPILE_MULTIPLY, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    factor, compared, left, *rest = re.findall(r"ld.global.b32|setp.eq.f32|bra|ld.global.v4|st.global.v4", done.stdout)
    assert (factor, compared, left) == ("ld.global.b32", "setp.eq.f32", "bra")
    assert rest and set(rest) == {"ld.global.v4", "st.global.v4"}
    assert "ld.global.b16" not in done.stdout


def test_where_there_is_no_triton_the_plain_operations_run_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(kernels, "triton_runs_on", lambda _: True)  # as on a GPU
    monkeypatch.setattr(importlib, "import_module", missing)
    kernels._works.cache_clear()
    for _ in range(2):
        x = torch.randn(3, 9)
        expected = x.logsumexp(1)
        found = softmax.chunk_loss(x, torch.zeros(3, dtype=torch.int64), None, None, Options(), Resources())
        torch.testing.assert_close(found.lse, expected)
    kernels._works.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "no Triton here (No module named 'triton'): the loss runs without, slower"
    ]


def test_on_a_cpu_nobody_looks_for_it() -> None:
    assert not kernels.triton_runs_on(torch.device("cpu"))
