"""Reads a model on the Hugging Face Hub in exact byte ranges of one commit, without storing it on disk.

One request lists the repository and pins its commit; every later request names that commit, so a branch that moves
meanwhile cannot mix two models. Only the ranges of a file that are asked for are transferred. The listing does not
use `HfApi.model_info`, which has no time limit, and which looks up and stores on disk which program is calling.

A read takes this path: a `repository` opens a `remote_file`, which asks the `client` for a range; the `client` repeats
a request if that can help, and makes each attempt on a `connection`. A failed attempt returns a `RequestFailure`, a
value. Neither huggingface_hub nor httpx2 is imported before it is needed.
"""

from bowline.checkpoint.places.hub.remote_file import RemoteFile
from bowline.checkpoint.places.hub.repository import HubRepository
from bowline.checkpoint.places.hub.time_limits import Patience

__all__ = ["HubRepository", "Patience", "RemoteFile"]
