"""What each of four processes runs: ten steps by FSDP2, DDP and tensor parallelism, and a distributed checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.fsdp_worker import by_data_parallel, by_groups
from tests.distributed.models import FAMILIES, MODELS
from tests.distributed.process_group import joined
from tests.distributed.state_worker import through_dcp
from tests.distributed.tensor_parallel_worker import split


def main() -> None:
    with joined():
        out = Path(sys.argv[1])
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        found: dict[str, Any] = {"fsdp": {name: by_groups(name, mesh) for name in MODELS}}
        found["ddp"] = {name: by_data_parallel(name) for name in FAMILIES}
        found["tp"] = {name: split(name, mesh, out) for name in MODELS}
        found["dcp"] = through_dcp(out, mesh, saves=True)
        torch.save(found, out / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
