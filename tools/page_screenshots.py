"""Writes the pictures of pages in `docs/images`: `make screenshots`.

The pages are those of SmolLM2-135M as `make real` fetches it, of a copy whose head was untied and changed, and of the
two compared. Each is shown light and dark, on a phone and on a desktop. The pages themselves, and pictures of their
whole length, stay in build/screenshots to be looked at.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

from tools.chromium import SCHEMES, SIZES, chromium

__all__ = ["main"]

ROOT = Path(__file__).parent.parent
MODEL = ROOT / ".peers" / "real" / "smollm2"
IMAGES = ROOT / "docs" / "images"
WORK = ROOT / "build" / "screenshots"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COLOURS = 128
MOST_BYTES = 150_000
PAGES = {
    "clean": ["audit", "smollm2", "--html", "clean.html"],
    "broken": ["audit", "smollm2-tuned", "--html", "broken.html"],
    "compared": ["compare", "smollm2", "smollm2-tuned", "--html", "compared.html"],
}
LOOKED_UP = "underneath"
"""A token whose head was moved, and whose neighbours are on the page."""


def main() -> int:
    """Write every picture, and print its size."""
    make_checkpoints()
    for command in PAGES.values():
        done = subprocess.run([sys.executable, "-m", "bowline", *command], cwd=WORK, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            print(done.stderr, file=sys.stderr)
            return 1
    IMAGES.mkdir(exist_ok=True)
    total = 0
    with chromium() as browser:
        for name in PAGES:
            for size in SIZES:
                for scheme in SCHEMES:
                    for part, data in pictures(browser, name, size, scheme).items():
                        file = IMAGES / f"{name}-{part}{size}-{scheme}.png"
                        file.write_bytes(data)
                        total += len(data)
                        print(f"{len(data):>8,}  {file.relative_to(ROOT)}")
                        if len(data) > MOST_BYTES:
                            print(f"{file.name} is larger than {MOST_BYTES:,} bytes", file=sys.stderr)
                            return 1
    print(f"{total:>8,}  in all")
    return 0


def make_checkpoints() -> None:
    """The model, and a copy whose head is its own, with moved and zeroed rows, under a flag that says tied."""
    shutil.rmtree(WORK, ignore_errors=True)
    clean, tuned = WORK / "smollm2", WORK / "smollm2-tuned"
    for directory in (clean, tuned):
        directory.mkdir(parents=True)
        for file in MODEL.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, directory)
    os.link(MODEL / "model.safetensors", clean / "model.safetensors")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    os.link(MODEL / "model.safetensors", tuned / shards[0])
    tensors = load_file(MODEL / "model.safetensors")
    head, random = tensors[EMBEDDING].copy(), np.random.default_rng(0)
    rows = random.choice(len(head), 4000, replace=False)
    noise = random.standard_normal((rows.size, head.shape[1])).astype(np.float32) * head.std()
    head[rows] += noise * random.lognormal(-2.0, 0.6, (rows.size, 1)).astype(np.float32)
    head[5:17] = 0  # special tokens that the fine-tuned model never saw
    save_file({HEAD: head}, tuned / shards[1], metadata={"format": "pt"})
    places = {**dict.fromkeys(tensors, shards[0]), HEAD: shards[1]}
    size = sum(tensor.nbytes for tensor in tensors.values()) + head.nbytes
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (tuned / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def pictures(browser: Any, name: str, size: str, scheme: str) -> dict[str, bytes]:
    """The top of a page, and of the compared and the broken one also the search, as files of PNG."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=1.5 if size == "phone" else 1,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"file://{WORK / name}.html")
    found = {"": small(page.screenshot())}
    page.fill("#query", LOOKED_UP)
    page.wait_for_selector("#matches a")
    page.locator("#matches a").first.click()
    page.wait_for_selector("#entry h3")
    (WORK / f"{name}-{size}-{scheme}-whole.png").write_bytes(page.screenshot(full_page=True))
    if name != "clean":
        page.evaluate("document.querySelector('#search').scrollIntoView()")
        found["search-"] = small(page.screenshot())
    context.close()
    return found


def small(picture: bytes) -> bytes:
    """The same picture with a palette of few colours."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    image = whole.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
