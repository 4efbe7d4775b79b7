"""The Triton kernels without a GPU: interpreted on the CPU, and compiled for GPUs."""

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

from bowline.functional.kernels import triton_support
from bowline.functional.loss.chunks import softmax
from bowline.functional.loss.loss_options import Options
from bowline.functional.loss.resource_limits import Resources

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".peers" / "triton"
COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bowline.functional.loss.chunks import triton_block_kernels, triton_row_kernels

name, dtype, capability, options = sys.argv[1:]
places = {
    "_row": (triton_row_kernels, triton_row_kernels.BLOCK, 16),
    "_powers": (triton_row_kernels, triton_row_kernels.BLOCK_ONCE, 8),
    "_lse": (triton_block_kernels, triton_block_kernels.BLOCK, 8),
    "_gradient": (triton_block_kernels, triton_block_kernels.BLOCK_ONCE, 4),
}
module, block, warps = places[name]
kinds = {"x": "*" + dtype, "out": "*" + dtype, "banned": "*u8", "labels": "*i64", "ids": "*i64"}
kinds |= dict.fromkeys(("stride", "out_stride", "size", "first", "ignored"), "i32")
kinds |= dict.fromkeys(("losses", "lse", "factor", "label", "added", "p_factor"), "*fp32")
kinds |= dict.fromkeys(("grad_loss", "grad_lse", "grad_label"), "*fp32")
kinds |= dict.fromkeys(("scale", "softcap", "z_loss", "share", "label_share"), "fp32")
optional = set() if options == "everything" else {"banned", "grad_lse", "scale", "softcap", "z_loss", "share"}
whole = {"stride", "out_stride", *({"size", "first"} if module is triton_block_kernels else ())}  # multiples of 16
signature, constants, aligned = {}, {}, {}
kernel = getattr(module, name)
for place, argument in enumerate(kernel.arg_names):
    given = argument in kinds and argument not in optional
    signature[argument] = kinds[argument] if given else "constexpr"
    if not given:
        constants[place,] = block if argument == "BLOCK" else None
    elif kinds[argument].startswith("*") or argument in whole:
        aligned[place,] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options={"num_warps": warps})
print(json.dumps({"ptx": made.asm["ptx"], "binary": len(made.asm["cubin"])}))
"""

COMPILE_MULTIPLY = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bowline.functional.kernels import triton_support

signature = {"x": "*bf16", "factor": "*fp32", "size": "i32", "BLOCK": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]}
source = ASTSource(triton_support._multiply, signature, {(3,): triton_support.BLOCK}, aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
"""


def run_with_triton(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs in a new process, because an imported Triton changes what other tests import."""
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


@pytest.mark.parametrize("tests", ["interpreted.py", "interpreted_blocks.py"])
def test_interpreted_the_kernels_do_what_float64_does(tests: str) -> None:
    """Runs the tests in those files."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::RuntimeWarning",
    ]  # numpy's, of infinities
    done = run_with_triton("-m", "pytest", *options, f"tests/functional/loss/{tests}", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout


def compiled(kernel: str, dtype: str, capability: str, options: str, cache: Path) -> str:
    """The assembly."""
    done = run_with_triton("-c", COMPILE, kernel, dtype, capability, options, TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    ptx: str = made["ptx"]
    assert made["binary"] > 1000
    assert ".local" not in ptx  # nothing is spilt that the program knows of
    return ptx


def alone(ptx: str) -> list[str]:
    """The instructions that read or write a single number."""
    return [line for line in ptx.splitlines() if "global.b16" in line or "global.b8" in line]


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability", "options"),
    [("_row", "bf16", "90", "none"), ("_row", "fp16", "80", "everything"), ("_powers", "bf16", "90", "none")],
)
def test_it_compiles_for_a_gpu_and_reads_and_writes_whole_vectors(
    kernel: str, dtype: str, capability: str, options: str, tmp_path: Path
) -> None:
    ptx = compiled(kernel, dtype, capability, options, tmp_path)
    assert ptx.count("ld.global.v4") >= 4 and ptx.count("st.global.v4") >= 2
    assert len(alone(ptx)) == (1 if options == "none" else 2)  # of the label, what it is and whether it is masked
    assert "cvt.rn." in ptx  # to the nearest


@pytest.mark.parametrize(
    ("kernel", "dtype", "capability", "options", "singly"),
    [
        ("_lse", "bf16", "90", "none", 1),  # the label's logit
        ("_lse", "fp16", "80", "everything", 1),
        ("_gradient", "bf16", "90", "none", 0),
        ("_gradient", "fp16", "80", "everything", 0),
    ],
)
def test_so_do_the_kernels_of_a_block_of_the_vocabulary(
    kernel: str, dtype: str, capability: str, options: str, singly: int, tmp_path: Path
) -> None:
    ptx = compiled(kernel, dtype, capability, options, tmp_path)
    assert ptx.count("ld.global.v4") >= 2 and ptx.count("st.global.v4") >= 2 * (kernel == "_gradient")
    assert len(alone(ptx)) == singly
    assert kernel == "_lse" or "cvt.rn." in ptx


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

    monkeypatch.setattr(triton_support, "triton_runs_on", lambda _: True)  # as on a GPU
    monkeypatch.setattr(importlib, "import_module", missing)
    triton_support._works.cache_clear()
    for _ in range(2):
        x = torch.randn(3, 9)
        expected = x.logsumexp(1)
        found = softmax.chunk_loss(x, torch.zeros(3, dtype=torch.int64), None, None, Options(), Resources())
        torch.testing.assert_close(found.lse, expected)
    triton_support._works.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "Triton does not work here (No module named 'triton'): the loss is computed without it, more slowly"
    ]


def test_on_a_cpu_nobody_looks_for_it() -> None:
    assert not triton_support.triton_runs_on(torch.device("cpu"))
