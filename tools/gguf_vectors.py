"""Records what the package `gguf` dequantises blocks of every type to, for the tests of `bowline.checkpoint`.

    PYTHONPATH=.peers/gguf python -m tools.gguf_vectors

It needs `gguf` and numpy, and writes `tests/checkpoint/formats/gguf/dequantised.json`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

OUT = Path(__file__).parents[1] / "tests" / "checkpoint" / "formats" / "gguf" / "dequantised.json"
TYPES: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
TYPES += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
SCALES: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
}
SCALES |= {"Q5_1": (0, 2)}
"""Where the float16 scales of a block stand, if not in its first two bytes."""


def blocks(name: str, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Blocks with the scales of a trained table, and one of random bytes alone, whose scale can be any number."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    count = 3 if elements == 256 else 6
    raw = random.integers(0, 256, (count, nbytes if elements > 1 else 32 * nbytes), dtype=np.uint8)
    if elements > 1:
        for at in SCALES.get(name, (0,)):
            scales = random.normal(0, 0.02, count - 1).astype(np.float16)
            raw[1:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw


def main() -> None:
    """Write the vectors of every type: the blocks, and their values as float32."""
    random = np.random.default_rng(2026)
    vectors = {}
    for name in TYPES:
        raw = blocks(name, random)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).astype(np.float32)
        vectors[name] = {
            "shape": list(values.shape),
            "blocks": b64encode(raw.tobytes()).decode(),
            "values": b64encode(values.tobytes()).decode(),
        }
    sizes = {kind.name: [kind.value, *gguf.GGML_QUANT_SIZES[kind]] for kind in gguf.GGMLQuantizationType}
    record = {"gguf": version("gguf"), "numpy": np.__version__, "sizes": sizes, "vectors": vectors}
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
