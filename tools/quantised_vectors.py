"""Records what other libraries dequantise quantised weights to, for the tests of `bowline.checkpoint`.

    .peers/mlx-lm-0.32.2/bin/python -m tools.quantised_vectors mlx
    .peers/vllm-0.32.0/bin/python -m tools.quantised_vectors vllm
    PYTHONPATH=.peers/torchao python -m tools.quantised_vectors torch

Each writes `tests/checkpoint/formats/quantised/NAME.json`: the tensors of a weight `head.weight` as their library
stores them, the config and the metadata that belong to them, and the values. `mlx` is `mlx.core.dequantize`; `vllm` is
the package `compressed_tensors` and vLLM's own reference for the layouts of GPTQ and AWQ (`quant_utils`); `torch` is
torchao and transformers' fine-grained FP8.
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).parents[1] / "tests" / "checkpoint" / "formats" / "quantised"
ROWS, COLUMNS = 16, 64
NAMES = {
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def trained() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows as in a trained table: normal, of different lengths, one of zeros, one value far from the others."""
    random = np.random.default_rng(2026)
    rows = random.normal(0, 0.05, (ROWS, COLUMNS)) * random.uniform(0.3, 2, (ROWS, 1))
    rows[3] = 0
    rows[5, 7] = 1.5
    return rows.astype(np.float32)


def stored(tensor: Any) -> dict[str, Any]:
    """One tensor as a record: dtype, shape and bytes."""
    kind = str(tensor.dtype).rpartition(".")[2]
    if isinstance(tensor, np.ndarray):
        raw = tensor.tobytes()
    else:
        import torch

        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": NAMES[kind], "shape": list(tensor.shape), "bytes": b64encode(raw).decode()}


def case(
    tensors: Mapping[str, Any],
    values: Any,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One weight: its tensors by their name below `head.`, and its values as float32."""
    dense = np.array(values.detach() if hasattr(values, "detach") else values)
    return {
        "tensors": {f"head.{name}": stored(tensor) for name, tensor in tensors.items()},
        "config": config or {},
        "metadata": metadata or {},
        "shape": list(dense.shape),
        "values": b64encode(dense.astype(np.float32).tobytes()).decode(),
    }


def mlx() -> dict[str, Any]:
    """Every width of MLX, and scales of float16."""
    import mlx.core as mx

    cases = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for size in (32, 64):
            codes, scales, biases = mx.quantize(mx.array(trained()), group_size=size, bits=bits)
            values = mx.dequantize(codes, scales, biases, group_size=size, bits=bits)
            tensors = {"weight": np.array(codes), "scales": np.array(scales), "biases": np.array(biases)}
            settings = {"quantization": {"group_size": size, "bits": bits}}
            cases[f"mlx {bits} bits, groups of {size}"] = case(tensors, np.array(values), settings)
    return {"mlx": version("mlx"), "cases": cases}


def vllm() -> dict[str, Any]:
    """compressed-tensors' formats, and the layouts of GPTQ and AWQ."""
    import torch

    for missing in (
        "nms",
        "qnms",
    ):  # torchvision's operators, which its wheel has for CUDA only; transformers wants them
        torch.library.define(f"torchvision::{missing}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from compressed_tensors.compressors.pack_quantized.base import (  # type: ignore[import-not-found]
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationScheme  # type: ignore[import-not-found]
    from compressed_tensors.quantization.lifecycle.forward import dequantize  # type: ignore[import-not-found]
    from vllm import __version__ as vllm_version
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        awq_pack,
        gptq_pack,
        pack_cols,
        quantize_weights,
    )
    from vllm.scalar_type import scalar_types

    cases = {}
    weight = torch.from_numpy(trained())
    generator = torch.Generator().manual_seed(0)
    for bits in (4, 8, 3):
        for symmetric in (True, False):
            for size in (32, None):
                groups = COLUMNS // size if size else 1
                scale = weight.reshape(ROWS, groups, -1).abs().amax(-1).clamp(min=1e-4) / (1 << (bits - 1))
                zero = torch.randint(-2, 2, scale.shape, generator=generator, dtype=torch.int8)
                strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
                weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
                scheme = QuantizationScheme(targets=["Linear"], weights=weights)
                state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
                packed = PackedQuantizationCompressor.compress(state, scheme)
                values = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
                config = _compressed("pack-quantized", weights)
                name = f"pack-quantized {bits} bits, {size or 'channel'}, {'' if symmetric else 'a'}symmetric"
                cases[name] = case(packed, values, config)
    for dtype, shape in (("int8", (ROWS, 1)), ("int8", (1,)), ("float8_e4m3fn", (ROWS, 1)), ("float8_e4m3fn", (1,))):
        largest = 127 if dtype == "int8" else 448
        whole = weight.abs().amax(1, keepdim=True).clamp(min=1e-4) if len(shape) == 2 else weight.abs().max().reshape(1)
        scale = whole / largest
        codes = (weight / scale).round().to(torch.int8) if dtype == "int8" else (weight / scale).to(torch.float8_e4m3fn)
        values = dequantize(codes.to(scale.dtype), scale)
        kind = "int-quantized" if dtype == "int8" else "float-quantized"
        tensors = {"weight": codes, "weight_scale": scale}
        cases[f"{kind}, scale {list(shape)}"] = case(tensors, values, _compressed(kind, {"num_bits": 8}))
    for name, kind, bits, zeros in (
        ("gptq 4 bits", scalar_types.uint4b8, 4, False),
        ("gptq 8 bits", scalar_types.uint8b128, 8, False),
        ("gptq 4 bits, zeros", scalar_types.uint4, 4, True),
        ("awq 4 bits", scalar_types.uint4, 4, True),
    ):
        values, codes, scales, zero = quantize_weights(weight.T.contiguous(), kind, 32, zero_points=zeros)
        zero = zero if zero is not None else torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int32)
        if name.startswith("awq"):
            qzeros, qweight = awq_pack(zero, 4, *zero.shape), awq_pack(codes, 4, *codes.shape)
            config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}
            cases[name] = case({"qweight": qweight, "qzeros": qzeros, "scales": scales}, values.T.contiguous(), config)
            continue
        order = torch.randperm(COLUMNS, generator=generator)
        mask = (1 << bits) - 1
        for version_, offset in (("gptq", 1), ("gptq_v2", 0)):
            tensors = {
                "qweight": gptq_pack(codes[order], bits, *codes.shape),
                "qzeros": pack_cols((zero - offset) & mask, bits, *zero.shape),
                "scales": scales,
                "g_idx": (torch.arange(COLUMNS, dtype=torch.int32) // 32)[order],
            }
            settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version_}
            cases[f"{name}, {version_}"] = case(
                tensors, values[order].T.contiguous(), {"quantization_config": settings}
            )
    return {"compressed-tensors": version("compressed-tensors"), "vllm": vllm_version, "cases": cases}


def _compressed(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}}


def torch_() -> dict[str, Any]:
    """torchao's subclasses as transformers saves them, and transformers' fine-grained FP8."""
    import torch
    from torchao.prototype.safetensors.safetensors_support import (  # type: ignore[import-not-found]
        flatten_tensor_state_dict,
    )
    from torchao.quantization import (  # type: ignore[import-not-found]
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
        quantize_,
    )
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    cases = {}
    int4 = torch.int4  # type: ignore[attr-defined]
    for name, config in (
        ("torchao int8", Int8WeightOnlyConfig(version=2)),
        ("torchao int4 per row", IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerAxis(0))),
        ("torchao int4 per group", IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32))),
        ("torchao float8", Float8WeightOnlyConfig(version=2)),
    ):
        module = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(trained()))
        quantize_(module, config)
        tensors, metadata = flatten_tensor_state_dict({"head.weight": module.weight.data})
        plain = {key.removeprefix("head."): tensor for key, tensor in tensors.items()}
        settings = {"quantization_config": {"quant_method": "torchao"}}
        cases[name] = case(plain, module.weight.dequantize(), settings, metadata)
    weight = torch.from_numpy(trained())
    for block in ([8, 16], [12, 24], None):  # whole blocks, cut blocks, one scale
        height, width = block or (ROWS, COLUMNS)
        tall, wide = -(-ROWS // height), -(-COLUMNS // width)
        grid = torch.zeros(tall * height, wide * width)
        grid[:ROWS, :COLUMNS] = weight
        largest = grid.reshape(tall, height, wide, width).abs().amax((1, 3)).clamp(min=1e-4)
        scales = largest / 448
        spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:ROWS, :COLUMNS]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        scales = scales if block else scales.reshape(())
        values = _dequantize_fp8_weight(codes, scales, block, torch.float32)
        block_config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": block}
        cases[f"fp8 blocks {block}"] = case(
            {"weight": codes, "weight_scale_inv": scales}, values, {"quantization_config": block_config}
        )
    return {name: version(name) for name in ("torch", "torchao", "transformers")} | {"cases": cases}


def main() -> None:
    """Write the vectors of the libraries that the argument names."""
    which = sys.argv[1]
    record = {"mlx": mlx, "vllm": vllm, "torch": torch_}[which]()
    (OUT / f"{which}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['cases'])} cases")


if __name__ == "__main__":
    main()
