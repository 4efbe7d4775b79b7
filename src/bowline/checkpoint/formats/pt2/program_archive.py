"""A `.pt2` file as a checkpoint: the stored tensors of its program, with the table and the heads found by their use."""

from __future__ import annotations

from typing import Final

from bowline.checkpoint.formats.graphs import PT2
from bowline.checkpoint.formats.graphs.graph_model import GraphModel, graph_model
from bowline.checkpoint.formats.graphs.uses import find_uses
from bowline.checkpoint.formats.pt2.json_fields import FETCH_AGAIN
from bowline.checkpoint.formats.pt2.payloads import read_json, read_payloads
from bowline.checkpoint.formats.pt2.program_graph import read_graph
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.formats.torch_archive import StoredZip
from bowline.checkpoint.places.byte_source import ByteSource
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import NoCheckpointError
from bowline.wording import listed

__all__ = ["LARGEST_GRAPH", "read_pt2"]

LARGEST_GRAPH: Final = 128 << 20
"""The bytes of `models/NAME.json`: torch writes about 2 KB for a node, so this has room for 60,000 of them."""
MODELS, COMPILED = "models/", "data/aotinductor/"
EARLIER: Final = "serialized_exported_program.json"
VERSION: Final = b"0"
SCHEMA: Final = 8
NEWER: Final = "if a newer torch wrote this file, look for a newer Bowline; otherwise fetch it again"


def read_pt2(files: FileSet, name: str) -> GraphModel:
    """Read the program in the file `name`, as torch 2.11 to 2.14 write it.

    No values are read, and no pickle: example inputs and objects that only torch reads are passed over.

    Raises:
        NoCheckpointError: the file has no program, or several.
        FormatError: it is damaged, of another version, or a tensor lies beyond its payload.
    """
    with files.open(name) as source:
        archive = _Archive(source)
        model = archive.model()
        stored = read_payloads(archive, model, source)
        content, document = read_json(
            archive, archive.entries[f"{archive.prefix}/{MODELS}{model}.json"], source, LARGEST_GRAPH
        )
        version = document.member(document.member(content, "schema_version", dict), "major", int)
        if version != SCHEMA:
            document.refuse(f"its schema has the version {shown(version)}, expected {SCHEMA}", NEWER)
        uses = find_uses(read_graph(content, document, stored))
    return graph_model(PT2, (name,), uses, stored, {})


class _Archive(StoredZip):
    """The archive of a program: its format and version are checked."""

    writer = "torch.export.save"

    def __init__(self, source: ByteSource) -> None:
        super().__init__(source)
        if EARLIER in self.entries:
            raise self._wrong(
                "an earlier format of torch.export.save, expected that of torch 2.11 or newer",
                "load it with torch.export.load, and save it again",
            )
        self.check_one_directory()
        stated = {key: self.find(key) for key in ("archive_format", "archive_version")}
        for key, expected in (("archive_format", b"pt2"), ("archive_version", VERSION)):
            entry = stated[key]
            if entry is None:
                raise self._wrong(f"has no {key}, expected an archive of torch.export.save")
            if (found := self.read(entry, 16)) != expected:
                raise self._wrong(f"its {key} is {found!r}, expected {expected!r}", NEWER)
        self.check_byte_order("export it again on a little-endian machine")

    def model(self) -> str:
        """The name of the one program in the archive."""
        inner = [name.removeprefix(f"{self.prefix}/") for name in self.entries]
        models = [
            name.removeprefix(MODELS).removesuffix(".json")
            for name in inner
            if name.startswith(MODELS) and name.endswith(".json")
        ]
        if len(models) == 1:
            return models[0]
        if models:
            names = listed([shown(one) for one in models], 3)
            raise NoCheckpointError(
                f"{self._source.name}: {len(models)} programs ({names}), expected one",
                help="save each with torch.export.save in a file of its own",
            )
        if any(name.startswith(COMPILED) for name in inner):
            raise NoCheckpointError(
                f"{self._source.name}: an AOTInductor package, whose weights are within compiled code, expected a "
                "program of torch.export",
                help="audit the checkpoint that it was compiled from, or what torch.export.save writes of it",
            )
        raise NoCheckpointError(
            f"{self._source.name}: an archive without a program, expected {MODELS}NAME.json", help=FETCH_AGAIN
        )
