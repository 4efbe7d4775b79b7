"""Rules about the files of a checkpoint: each reports one kind of lint that the reader found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.auditing.rules.token_texts import tokens_of_difference
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.lint import LintKind
from bowline.wording import joined, listed

if TYPE_CHECKING:  # an audit of headers needs no numpy
    from bowline.auditing.base_comparison import TableComparison

MOST_NAMED = 4
FLOATING = ("F64", "F32", "F16", "BF16")
CAST = "noise from a cast"
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<ending>\.\w+)")


def _observations(evidence: Evidence, kind: LintKind, help: str) -> Iterator[Observation]:
    for lint in evidence.lints:
        if lint.kind is kind:
            file = lint.files[0] if lint.files else None
            yield Observation(message=lint.message, help=help, tensors=lint.tensors, file=file)


def missing_shards(files: Sequence[str]) -> list[str]:
    """What is missing by the numbers in the shards' own names: a phrase for each incomplete set of shards.

    Example:
        >>> missing_shards(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
        ['of 3 shards, 1 is missing: model-00002-of-00003.safetensors']
    """
    sets: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        named = NUMBERED.fullmatch(file)
        if named:
            sets.setdefault((named["stem"], named["total"], named["ending"]), set()).add(int(named["number"]))
    phrases = []
    for (stem, total, ending), numbers in islice(sets.items(), MOST_NAMED):
        every = range(1, int(total) + 1)
        missing = len(every) - sum(number in every for number in numbers)
        if missing:
            some = islice((number for number in every if number not in numbers), MOST_NAMED)
            names = ", ".join(f"{stem}-{number:05d}-of-{total}{ending}" for number in some)
            more = f" and {missing - MOST_NAMED} more" if missing > MOST_NAMED else ""
            are = "is" if missing == 1 else "are"
            phrases.append(f"of {_shards(len(every))}, {missing} {are} missing: {names}{more}")
    return phrases


def _shards(count: int) -> str:
    return f"{count} shard{'s' * (count != 1)}"


@rule("BW301", "two-models", Severity.WARNING)
def two_models(evidence: Evidence) -> Iterator[Observation]:
    """The directory holds two models: a single file and an index with shards.

    What: `model.safetensors` and `model.safetensors.index.json` are both present.

    Why it hurts: transformers reads the single file; mergekit and vLLM read the shards that the index names. A later
    save in shards leaves the stale single file in place, and transformers goes on loading the old model.

    Example: training saved once below the shard size, and later above it, into the same directory.

    Fix: remove the stale one; the modification times show which it is.
    """
    return _observations(
        evidence, LintKind.TWO_MODELS, "remove the stale one, the single file or the index and its shards"
    )


@rule("BW302", "index-disagrees", Severity.ERROR)
def index_disagrees(evidence: Evidence) -> Iterator[Observation]:
    """The index and the shards disagree about which tensors there are.

    What: the index names a tensor that its shard does not hold, or a shard holds one that the index does not name.

    Why it hurts: a tensor that its shard lacks is drawn at random; one that the index does not name is never loaded.

    Example: a shard was replaced after an edit, and the index was left as it was.

    Fix: rebuild the index from the shards.
    """
    return _observations(evidence, LintKind.INDEX_DISAGREES, "rebuild the index from the shards")


@rule("BW303", "name-in-two-shards", Severity.ERROR)
def name_in_two_shards(evidence: Evidence) -> Iterator[Observation]:
    """One tensor name is stored in two shards.

    What: two shards of one checkpoint hold a tensor of the same name.

    Why it hurts: which of the two is loaded depends on the order in which a loader reads.

    Example: two merged models were written into one directory.

    Fix: remove the tensor from the shard that the index does not name.
    """
    return _observations(evidence, LintKind.NAME_IN_TWO_SHARDS, "keep the tensor in the shard that the index names")


@rule("BW304", "orphan-shard", Severity.WARNING)
def orphan_shard(evidence: Evidence) -> Iterator[Observation]:
    """No index names this shard.

    What: a file is named like a shard, and no index refers to it.

    Why it hurts: most loaders never load it, but those that read every `*.safetensors` do. Every download includes it.

    Example: a model was saved into the directory of an older save that had more shards.

    Fix: remove it.
    """
    return _observations(evidence, LintKind.ORPHAN_SHARD, "remove the file if it is left from an earlier save")


@rule("BW305", "wrong-total-size", Severity.WARNING)
def wrong_total_size(evidence: Evidence) -> Iterator[Observation]:
    """The index's `total_size` differs from the size of the tensors.

    What: `metadata.total_size` differs from the sum of the tensors' bytes. Bytes that tensors share, as in a pickle,
    may count once or for each of them.

    Why it hurts: loaders plan memory by it, and a wrong size shows that the index was not written with these shards.

    Example: a head was removed from a shard by hand.

    Fix: rebuild the index from the shards.
    """
    return _observations(evidence, LintKind.WRONG_TOTAL_SIZE, "rebuild the index from the shards")


@rule("BW306", "path-leaves-directory", Severity.ERROR)
def path_leaves_directory(evidence: Evidence) -> Iterator[Observation]:
    """The index names a file outside the checkpoint.

    What: a path in `weight_map` is absolute, climbs out with `..`, or is a link that leads out of the directory.

    Why it hurts: the author of the index decides which file outside the directory a loader opens. The audit did not
    open it.

    Example: `"lm_head.weight": "../../secrets.safetensors"`.

    Fix: move the shard into the directory, and write its plain file name into the index.
    """
    return _observations(
        evidence,
        LintKind.PATH_LEAVES_DIRECTORY,
        "move the shard into the directory, and write its plain file name into the index",
    )


@rule("BW307", "shard-missing", Severity.ERROR)
def shard_missing(evidence: Evidence) -> Iterator[Observation]:
    """The index names a shard that is missing.

    What: a file in `weight_map` is missing.

    Why it hurts: loaders refuse the checkpoint. The other findings do not take that shard into account.

    Example: an interrupted download.

    Fix: fetch the shard.
    """
    found = list(_observations(evidence, LintKind.SHARD_MISSING, "fetch the missing shard"))
    if len(found) == 1:
        yield found[0]
    elif found:  # one index names them all
        before, after = f"{found[0].file} names ", ", which is missing"
        names = [seen.message.removeprefix(before).removesuffix(after) for seen in found]
        yield replace(
            found[0],
            message=f"{before}{len(names)} shards that are missing: {listed(names, limit=8)}",
            help="fetch the missing shards",
        )


@rule("BW308", "shard-malformed", Severity.ERROR)
def shard_malformed(evidence: Evidence) -> Iterator[Observation]:
    """A shard cannot be read.

    What: one of several files is truncated, has a malformed header, or cannot be opened.

    Why it hurts: loaders refuse the checkpoint. The other findings do not take that shard into account.

    Example: a download that stopped half way.

    Fix: fetch the shard again.
    """
    return _observations(evidence, LintKind.SHARD_MALFORMED, "fetch the shard again")


@rule("BW309", "index-missing", Severity.ERROR)
def index_missing(evidence: Evidence) -> Iterator[Observation]:
    """The shards have no index.

    What: the directory holds files named like shards, and no index that names them. If the names say that there are
    more shards (`-of-00005`), the message lists those that are missing.

    Why it hurts: transformers finds no model. Other loaders load every file in the directory.

    Example: `*.safetensors` was copied, and `*.json` was not.

    Fix: fetch the index, or rebuild it from the shards.
    """
    for lint in evidence.lints:
        if lint.kind is LintKind.INDEX_MISSING:
            index = "the index (model.safetensors.index.json)"
            incomplete = missing_shards(lint.files)
            unread = "does not load it" if len(lint.files) == 1 else "loads none of them"
            seen = f"{_shards(len(lint.files))}, but no index; transformers {unread}"
            yield Observation(
                message="; ".join([seen, *incomplete]),
                help=(
                    f"fetch the missing shards and {index}"
                    if incomplete
                    else f"fetch {index} as well, or rebuild it from the shards"
                ),
                tensors=lint.tensors,
                file=lint.files[0] if lint.files else None,
            )


@rule("BW310", "index-malformed", Severity.ERROR)
def index_malformed(evidence: Evidence) -> Iterator[Observation]:
    """The index beside a single file cannot be read.

    What: `model.safetensors.index.json` is not JSON, or lacks the structure of an index.

    Why it hurts: loaders that prefer the index refuse the checkpoint; other loaders do not notice.

    Example: an index cut short by a full disk.

    Fix: remove it if the single file holds the model.
    """
    return _observations(evidence, LintKind.INDEX_MALFORMED, "remove the index if the single file holds the model")


@rule("BW311", "misaligned", Severity.INFO)
def misaligned(evidence: Evidence) -> Iterator[Observation]:
    """A tensor's bytes do not begin at a multiple of its element size.

    What: the header is not padded, so the data behind it is not aligned. Readers accept such a file; the safetensors
    library writes none, MLX does (0.32).

    Why it hurts: a reader that maps the file must copy the tensor.

    Example: a model that mlx-lm converted.

    Fix: none is needed; to map the file, load and save it with safetensors.
    """
    return _observations(evidence, LintKind.MISALIGNED, "load and save the file with safetensors")


@rule("BW312", "odd-name", Severity.WARNING)
def odd_name(evidence: Evidence) -> Iterator[Observation]:
    """A tensor has an empty name, or one with a NUL in it.

    What: safetensors accepts such names; tools written in C cut a name at the NUL.

    Why it hurts: two tensors can end up with one name.

    Example: `save_file({"": tensor}, "model.safetensors")`.

    Fix: rename the tensor.
    """
    return _observations(evidence, LintKind.ODD_NAME, "rename the tensor")


@rule("BW313", "odd-bool", Severity.WARNING)
def odd_bool(evidence: Evidence) -> Iterator[Observation]:
    """A BOOL tensor holds a byte that is neither 0 nor 1.

    What: safetensors accepts any byte. The audit checks tensors of up to 16 MB.

    Why it hurts: in C, such a bool is undefined behaviour: one operation treats it as true, another adds its value.

    Example: a mask with the value 255 was written as BOOL.

    Fix: save the tensor again with 0 and 1.
    """
    files: dict[str, list[str]] = {}
    for name in evidence.odd_bools:
        files.setdefault(evidence.tensors[name].file, []).append(name)
    for file, names in files.items():
        are = "is BOOL, and holds" if len(names) == 1 else f"and {len(names) - 1} more are BOOL, and hold"
        yield Observation(
            message=f"{shown(names[0])} {are} bytes that are neither 0 nor 1",
            help="save them again with 0 and 1",
            tensors=tuple(names),
            file=file,
        )


@rule("BW314", "nested-tensors", Severity.ERROR)
def nested_tensors(evidence: Evidence) -> Iterator[Observation]:
    """The saved dictionary holds the tensors in a nested dictionary.

    What: `pytorch_model.bin` holds `{"state_dict": {...}}` or the like. The other findings are about the nested
    tensors.

    Why it hurts: loaders expect the tensors at the top level. transformers 4 finds no name that it knows and draws
    every weight at random; transformers 5 does the same if the config states a dtype, and fails otherwise.

    Example: `torch.save({"state_dict": model.state_dict(), "epoch": 3}, "pytorch_model.bin")`.

    Fix: save the inner dictionary alone, or load it and call `model.save_pretrained`.
    """
    return _observations(evidence, LintKind.NESTED_TENSORS, "save the inner dictionary alone")


@rule("BW315", "second-format", Severity.INFO, also=Severity.WARNING)
def second_format(evidence: Evidence) -> Iterator[Observation]:
    """The model is stored in a second format too.

    What: beside the safetensors lies `pytorch_model.bin`, or an original file of Llama or Mistral (`consolidated.*`).
    Embedding and head are compared, row by row. If they differ, or their lengths do, this is a warning. A difference
    that only a cast explains is not. Other tensors are not compared, and on the Hub, with `--headers-only`, or for a
    model that is split for tensor parallelism, none is.

    Why it hurts: each loader reads one of the files. transformers 4.57.1 and 5.23.0 read the safetensors
    (`use_safetensors=False` reads the pickle), as they did when run. By their sources, mlx-lm 0.32.2 reads
    `model*.safetensors`, llama.cpp's converter the same before `pytorch_model*.bin`, and vLLM 0.32.0 reads
    `consolidated*.safetensors` before all others. Two files that differ are two models. Two that agree take twice the
    space.

    Example: a model was fine-tuned or resized and saved as safetensors into the directory of the original, whose
    `pytorch_model.bin` stayed.

    Fix: remove the file that is stale, or not needed.
    """
    stored_in = {tensor.file for tensor in evidence.tensors.values()}
    audited = next(iter(stored_in)) if len(stored_in) == 1 else "the safetensors"
    for other in evidence.other_weights:
        differing = [table for table in other.tables if not _is_equal(table)]
        if differing:
            named = "; ".join(f"{table.tensor}: {_rows_of(evidence, table)}" for table in differing)
            yield Observation(
                message=f"{other.file} and {audited} differ: {named}. {_readers(other.file, audited)}",
                help="remove the file that is stale",
                tensors=tuple(table.tensor for table in differing),
                file=other.file,
                severity=Severity.WARNING,
            )
        elif other.tables:
            ends = joined(sorted({end for table in other.tables for end in table.ends}))
            cast = next((f" but for {table.difference}" for table in other.tables if table.difference), "")
            yield Observation(
                message=(
                    f"{other.file} ({other.nbytes / 1e6:.3g} MB) holds the same {ends} as {audited}{cast}. "
                    f"{_readers(other.file, audited)}"
                ),
                help="remove it if no loader needs it",
                file=other.file,
            )
        else:
            yield Observation(
                message=f"{other.file} lies beside {audited} and was not compared: {other.reason}",
                help="remove it if no loader needs it",
                file=other.file,
            )


@rule("BW316", "hub-count-differs", Severity.INFO)
def hub_count_differs(evidence: Evidence) -> Iterator[Observation]:
    """The Hub states another number of parameters than the files hold.

    What: the Hub's count of the floating-point parameters in the safetensors, which it shows on the model's page,
    differs from the sum over the tensors. Only the main branch is counted, and the number comes with the listing of
    the files: the audit makes no request for it. Models with a `quantization_config` are not compared.

    Why it hurts: tools estimate memory by this number, and people compare models by it. A model whose tied head is
    stored twice is counted with both copies.

    Example: the files were replaced, and the Hub had not counted again.

    Fix: none in the files, if the audit finds nothing else; a new commit makes the Hub count again.
    """
    stated = {dtype: count for dtype, count in evidence.hub_parameters.items() if dtype in FLOATING}
    safetensors = all(tensor.file.endswith(".safetensors") for tensor in evidence.tensors.values())
    if not stated or not safetensors or not evidence.complete or "quantization_config" in (evidence.config or {}):
        return
    held: Counter[str] = Counter()
    for tensor in evidence.tensors.values():
        if tensor.dtype in FLOATING:
            held[tensor.dtype] += prod(tensor.shape)
    if dict(held) != stated:
        yield Observation(
            message=(f"the Hub counts {_by_dtype(stated)} parameters, and the files hold {_by_dtype(held)}"),
            help="nothing in the files needs a change; a new commit makes the Hub count again",
        )


def _by_dtype(counts: Mapping[str, int]) -> str:
    return joined([f"{count:,} ({dtype})" for dtype, count in sorted(counts.items())]) or "none"


def _is_equal(table: TableComparison) -> bool:
    """Whether two tables are equal, or differ by a cast alone."""
    cast = table.difference is not None and table.difference.cause.value == CAST
    return table.reason is None and table.rows == table.base_rows and (table.difference is None or cast)


def _rows_of(evidence: Evidence, table: TableComparison) -> str:
    """How two tables differ, with some of the tokens."""
    compared = str(table).replace("the base's", "its").replace("in the base", "in it")
    changed = compared.replace(" rows changed", " rows differ").replace("not compared: ", "")
    return changed + tokens_of_difference(evidence, table.difference)


def _readers(file: str, audited: str) -> str:
    """The loaders that read each of the two files."""
    if file.endswith(".safetensors"):
        return f"vLLM reads {file}; transformers, mlx-lm and llama.cpp's converter read {audited}"
    if file.startswith("consolidated"):
        return f"transformers, vLLM, mlx-lm and llama.cpp's converter read {audited}; Meta's own code reads {file}"
    return f"transformers, vLLM, mlx-lm and llama.cpp's converter read {audited}, unless they are made to read {file}"
