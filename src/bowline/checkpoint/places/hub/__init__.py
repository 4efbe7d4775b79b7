"""A model on the Hugging Face Hub, read where it lies: exact byte ranges of one commit, nothing kept on disk.

One request lists the repository and pins its commit; every later request names that commit, so a branch that moves
meanwhile cannot mix two models. Of a file, only the ranges that are asked for are transferred. The listing is asked
for here and not through `HfApi.model_info`, which has no limit on its time, and which looks up and stores on disk
which program is calling.

A read goes one way: a `repository` hands out a `remote_file`, which asks the `client` for a range; the `client` asks
again where that helps, each attempt on a `connection`. What went wrong comes back as a `failure`, a value. Neither
huggingface_hub nor httpx2 is imported before it is needed.
"""

from bowline.checkpoint.places.hub.remote_file import RemoteFile
from bowline.checkpoint.places.hub.repository import HubRepository
from bowline.checkpoint.places.hub.time_limits import Patience

__all__ = ["HubRepository", "Patience", "RemoteFile"]
