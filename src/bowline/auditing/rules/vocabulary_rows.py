"""Rules about the vocabulary: rows that do not match the ids, and rows with odd values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.edit_commands import edit_command
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.auditing.rules.token_texts import runs, tokens_of
from bowline.auditing.shape_fit import wrong_lengths
from bowline.checkpoint.formats.strict_json import shown
from bowline.families.gguf_names import GGUF_LOADER
from bowline.tie import TieState
from bowline.wording import joined, listed

if TYPE_CHECKING:  # an audit of headers needs no numpy
    from bowline.auditing.row_statistics import TableRows

Seen = TypeVar("Seen")
TENSOR_CORE_ROWS = 8
SCALED_MEAN = '; resize_vocab(new_rows="scaled-mean") adds rows of the usual norm'
TIED = (TieState.SHARED, TieState.ALIAS, TieState.EQUAL)


@rule("BW201", "vocab-size-mismatch", Severity.ERROR)
def vocab_size_mismatch(evidence: Evidence) -> Iterator[Observation]:
    """The length of a vocabulary tensor differs from the config's `vocab_size`.

    What: the tensor's vocabulary axis is longer or shorter than `vocab_size`, in a GGUF file than the number of tokens.

    Why it hurts: loaders build the model from the config and refuse the tensor, or draw it at random if they are told
    to ignore mismatched sizes. llama.cpp refuses such a GGUF file.

    Example: an embedding was resized by hand, and its `final_logits_bias` or MLM bias was not.

    Fix: set `vocab_size` to the number of rows if all vocabulary tensors agree on it; otherwise resize the tensors
    that were not resized. Convert a GGUF file again from a checkpoint whose tokenizer and tables agree.

    Reported in: huggingface/transformers#35141
    """
    size = evidence.declaration.vocab_size
    newest = max(evidence.declaration.loaders, default=GGUF_LOADER if evidence.gguf_file else "")
    lengths = wrong_lengths(evidence.declaration, evidence.tensors, newest)
    wrong = {name: length for name, length in lengths.items() if length is not None}
    if size is None or not wrong:
        return
    stated = ", ".join(f"{name} has {rows}" for name, rows in wrong.items())
    together = len(wrong) == len(evidence.declaration.vocabulary) and len(set(wrong.values())) == 1
    if evidence.gguf_file:
        states = "has" if evidence.tokenizer else "is"
        help = "convert the model again, from a checkpoint with a row for each token and no others"
    else:
        states = "is"
        help = f"set {size.path} to {next(iter(wrong.values()))}" if together else "resize all vocabulary tensors alike"
    yield Observation(
        message=f"{size.path} {states} {size.value}{' tokens' if states == 'has' else ''}, but {stated}",
        help=help,
        tensors=tuple(wrong),
        file=evidence.config_file,
    )


@rule("BW202", "tokenizer-larger", Severity.ERROR, also=Severity.WARNING)
def tokenizer_larger(evidence: Evidence) -> Iterator[Observation]:
    """The tokenizer has ids without a row in the embedding.

    What: the largest id in `tokenizer.json` or `added_tokens.json` has no row in the embedding. Without a
    `tokenizer.json` the ids are those of `vocab.json`, `tokenizer.model` (SentencePiece) or `vocab.txt` (WordPiece).

    Why it hurts: the first text with that token ends in an index error, or on a GPU in a device-side assert that does
    not name the token.

    Example: tokens were added to the tokenizer, and `resize_token_embeddings` was not called.

    If every such id is an added token, this is a warning: some models use such an id as an image placeholder, which
    their code replaces before the look-up.

    Fix: resize the embedding and everything tied to it, or remove the tokens.

    Reported in: huggingface/transformers#35141
    """
    rows, tokenizer = _rows(evidence), evidence.tokenizer
    if rows is not None and tokenizer is not None and tokenizer.size > rows:
        beyond = {number for number in tokenizer.ids.values() if number >= rows}
        yield Observation(
            message=(
                f"the tokenizer ({', '.join(tokenizer.files)}) has {len(beyond)} id{'s' * (len(beyond) != 1)} beyond "
                f"the table's {rows} rows, up to {tokenizer.largest_id} ({tokenizer.largest_token!r:.60})"
            ),
            help=f"{command} adds rows for them, to be trained; or remove the tokens"
            if (command := edit_command(evidence, "resize", f"--to {tokenizer.size}"))
            else "resize the embedding and everything tied to it, or remove the tokens",
            tensors=(evidence.declaration.embedding or "",),
            file=tokenizer.files[0],
            severity=Severity.WARNING if beyond <= tokenizer.added else None,
        )


@rule("BW210", "vocabularies-differ", Severity.WARNING)
def vocabularies_differ(evidence: Evidence) -> Iterator[Observation]:
    """`tokenizer.json` and an older vocabulary file beside it differ.

    What: `tokenizer.model` (SentencePiece) or `vocab.txt` (WordPiece) has another number of tokens than
    `tokenizer.json`, or another token under an id. Tokens that were added later do not count, and of a SentencePiece
    model only the normal pieces are compared by their text: converters rename control, byte and unused pieces.

    Why it hurts: the two files are read by different programs, so one text becomes different ids. transformers and vLLM
    read `tokenizer.json`; llama.cpp's converter reads `tokenizer.model` first for Llama and its relatives, and the slow
    tokenizers of transformers 4 read the older files.

    Example: the `[unused]` tokens of a BERT were renamed in `vocab.txt`, and `tokenizer.json` was left as it was.

    Fix: keep the file that the model was trained with, and write the other from it, or remove the other.
    """
    for difference in evidence.tokenizer.differences if evidence.tokenizer else ():
        seen = []
        if difference.tokens != difference.others:
            seen.append(f"{difference.file} has {difference.tokens} tokens, and tokenizer.json {difference.others}")
        if difference.example is not None:
            number, ours, theirs = difference.example
            ids = "1 id has" if difference.moved == 1 else f"{difference.moved} ids have"
            where = "another token" if difference.moved == 1 else "other tokens"
            seen.append(
                f"{ids} {where} in {difference.file} than in tokenizer.json: {number} is {shown(theirs)}, and "
                f"{shown(ours)} in tokenizer.json"
            )
        yield Observation(
            message="; ".join(seen),
            help="keep the file that the model was trained with, and write the other from it, or remove the other",
            file=difference.file,
        )


@rule("BW203", "special-id-out-of-range", Severity.WARNING)
def special_id_out_of_range(evidence: Evidence) -> Iterator[Observation]:
    """A special token id in the config has no row in the embedding.

    What: `pad_token_id`, `bos_token_id`, `eos_token_id` or another `*_token_id` is negative, or not less than the
    number of rows. In a GGUF file these are `tokenizer.ggml.*_token_id`.

    Why it hurts: generation never stops, or padding indexes outside the table. A negative `pad_token_id` counts
    from the end: the last row silently becomes the padding row.

    Example: `pad_token_id: -1`, once written by converters of Llama; `pad_token_id: 32000` on a table of 32000 rows.

    Fix: write the id that the tokenizer uses, or null if it has none.
    """
    rows = _rows(evidence)
    if rows is None or evidence.config is None:
        return
    from bowline.auditing.special_ids import special_ids

    wrong = {path: number for path, number in special_ids(evidence.config).items() if not 0 <= number < rows}
    if wrong:
        stated = listed([f"{path}: {number}" for path, number in wrong.items()], limit=8)
        yield Observation(
            message=f"{stated}, but ids run from 0 to {rows - 1}",
            help=(
                "convert the model again, with the id that the tokenizer uses"
                if evidence.gguf_file
                else "write the id that the tokenizer uses, or null if it has none"
            ),
            file=evidence.config_file,
        )


@rule("BW204", "padding-row", Severity.INFO, also=Severity.WARNING)
def padding_row(evidence: Evidence) -> Iterator[Observation]:
    """The padding row is zero, the table's mean, a copy of another row, as initialised, or trained.

    What: the row of `pad_token_id` is classified as zero, mean (of the table, as resizing writes it), a copy of another
    row, init-like (as drawn at initialisation, never trained), or trained.

    Why it hurts: `padding_idx` blocks the gradient of the embedding's look-up, but not the head's. Under a tied head
    the softmax's denominator changes the row at every step although padding is never a label, so the padding row of a
    trained model is not zero. Zeroing the row afterwards does not rule padding out as an output: its logit is 0 plus
    the bias, which wins wherever the other logits are negative.

    If padding has the id of another special token, the row is that token's too. The end-of-text token is a label, and
    is trained as one. A data collator that masks labels by `pad_token_id` then also masks every end of a text, so that
    fine-tuning no longer teaches the model to stop.

    Example: BERT, whose padding row is trained; or a model whose padding row was zeroed by a tool.

    Fix: leave a trained row alone. To rule padding out as an output, mask its logit.
    """
    padding = evidence.padding
    if padding is None or evidence.declaration.embedding is None:
        return
    head_tied, trained = _head_is_tied(evidence), not _looks_drawn(evidence)
    roles = _other_roles(evidence, padding.id)
    ends_text = next((role for role in roles if "eos_token" in role), None)
    if padding.row_class.value == "zero" and head_tied:
        what = "an end of the text is" if ends_text else "padding is"
        yield Observation(
            message=(
                f"row {padding.id} (pad_token_id{f', also {ends_text}' if ends_text else ''}) is zero and the head is "
                "tied: its logit is 0 plus the bias"
                f"{f', so {what} likely where the other logits are negative' if trained else ' until it is trained'}"
            ),
            help=(
                "take the row from an earlier checkpoint: the model ends its texts with this token"
                if ends_text and trained
                else "mask the padding logit if the model must not generate padding"
            ),
            tensors=(evidence.declaration.embedding,),
            severity=Severity.WARNING if trained else None,
        )
    elif padding.row_class.value in ("mean", "copy", "init-like", "trained"):
        value = padding.row_class.value
        words = {"mean": "the mean of the table", "init-like": "init-like (as drawn, never trained)"}
        word = f"a copy of row {padding.copy_of}" if padding.copy_of is not None else words.get(value, value)
        why = _why_trained(roles, head_tied, trained=value == "trained")
        yield Observation(
            message=f"row {padding.id} (pad_token_id) is {word}{why}",
            help=(
                "no change is needed; in fine-tuning, mask padded labels by the attention mask: by their id, every end "
                "of a text is masked too"
                if ends_text
                else "no change is needed, but do not expect zero embeddings for padded inputs"
            ),
            tensors=(evidence.declaration.embedding,),
        )


@rule("BW205", "duplicate-rows", Severity.INFO)
def duplicate_rows(evidence: Evidence) -> Iterator[Observation]:
    """Some rows are equal byte for byte.

    What: the table has groups of two or more equal rows. Rows of zeros are reported separately (BW206).

    Why it hurts: the model cannot distinguish those tokens as input or, under a tied head, as output.

    Example: tokens were added with one initial value (the mean, or a copied token) and never trained.

    Fix: train the tokens, or remove them.
    """
    found = (
        (table.name, (table.duplicates, _shortness(table, _largest(table.duplicates))))
        for table in evidence.tables
        if table.duplicates
    )
    for names, (groups, norms) in _together(found):
        largest = _largest(groups)
        yield Observation(
            message=(
                f"{_have(names)} {sum(len(group) for group in groups)} rows in {len(groups)} groups of equal rows, "
                f"the largest of {len(largest)} ({runs(largest)}){norms}{tokens_of(evidence, largest)}"
            ),
            help=f"train these tokens, or remove them{SCALED_MEAN if norms else ''}",
            tensors=names,
        )


@rule("BW206", "zero-rows", Severity.INFO, also=Severity.WARNING)
def zero_rows(evidence: Evidence) -> Iterator[Observation]:
    """Some rows other than the padding row are zero.

    What: every value of these rows is zero.

    Why it hurts: if they are output rows, their logit is 0 plus the bias, which wins the argmax where the other logits
    are negative. A model with a trimmed or padded vocabulary then answers with tokens that do not exist.

    Example: a table padded with zeros to a multiple of 64 for tensor cores.

    Fix: mask those logits, or set the rows to the mean of the table.
    """
    pad = evidence.padding.id if evidence.padding else None
    zero = ((table.name, tuple(int(row) for row in table.zero if row != pad)) for table in evidence.tables)
    for names, rows in _together(zero):
        is_output = evidence.declaration.head in names or _head_is_tied(evidence)
        yield Observation(
            message=f"{_have(names)} {len(rows)} row{'s' * (len(rows) != 1)} of zeros "
            f"({runs(rows)}){tokens_of(evidence, rows)}"
            + ("; as output rows they win wherever the other logits are negative" if is_output else ""),
            help="mask their logits, or set the rows to the mean of the table",
            tensors=names,
            severity=Severity.WARNING if is_output else None,
        )


@rule("BW207", "not-finite-rows", Severity.ERROR)
def not_finite_rows(evidence: Evidence) -> Iterator[Observation]:
    """Some rows have NaN or infinite values.

    What: a value in these rows is not a finite number.

    Why it hurts: one such row makes every logit, or every later hidden state, NaN. A NaN also makes loaders treat two
    equal ends of a tie as different.

    Example: an overflow in a cast to float16.

    Fix: take the rows from a checkpoint from before the overflow, or cast again from the wider dtype.
    """
    for names, rows in _together((table.name, tuple(map(int, table.not_finite))) for table in evidence.tables):
        count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
        yield Observation(
            message=f"{_have(names)} {count} with NaN or infinite values ({runs(rows)}){tokens_of(evidence, rows)}",
            help="take these rows from an earlier checkpoint, or cast again from the wider dtype",
            tensors=names,
        )


@rule("BW208", "never-trained-rows", Severity.INFO)
def never_trained_rows(evidence: Evidence) -> Iterator[Observation]:
    """Some rows look as if they were never trained.

    What: one of two signs. Either the rows of smallest norm all point in one direction, and these rows have a small
    norm and point the same way. Or these rows are equal up to noise (cosine of at least 0.995 to their common
    direction), whatever their norm is. Tokens that occur in no training text are only pushed away from the hidden
    states, all in the same direction. Rows that are equal byte for byte and like no other row are reported separately
    (BW205).

    Why it hurts: such a token in a prompt makes the model behave oddly ("glitch tokens"), and fine-tuning has to learn
    its row from nothing.

    Example: BERT's `[unused1]` to `[unused993]`, which are short; Gemma 3's `<unused0>` to `<unused6241>`, which are as
    long as all rows and have cosines of 0.9999 with each other.

    Fix: none is needed if the tokens are never used. Otherwise reserve them for new tokens, or train them.
    """
    signs = (
        (table.name, (sign, rows, table.rows, _shortness(table, rows)))
        for table in evidence.tables
        for sign, rows in _untrained(table)
        if rows
    )
    for names, (sign, rows, of, norms) in _together(signs):
        yield Observation(
            message=(
                f"{_have(names)} {len(rows)} rows ({_share(len(rows), of)}) that look untrained ({runs(rows)}): {sign}"
                f"{norms}{tokens_of(evidence, rows)}"
            ),
            help=f"do not rely on these tokens before training them{SCALED_MEAN if norms else ''}",
            tensors=names,
        )


@rule("BW209", "uneven-rows", Severity.INFO)
def uneven_rows(evidence: Evidence) -> Iterator[Observation]:
    """The number of rows is not a multiple of 8, which is slow on tensor cores.

    What: the number of rows of the embedding is not a multiple of 8.

    Why it hurts: half-precision matrix multiplications are fastest when their sizes are multiples of 8 (64 on newer
    chips). Another vocabulary size slows the largest multiplication of a small model.

    Example: GPT-2's 50257 rows; nanoGPT pads them to 50304.

    Fix: pad the table to a multiple of 64 before training, and mask the new logits.
    """
    rows = _rows(evidence)
    if rows is not None and rows % TENSOR_CORE_ROWS and evidence.declaration.embedding:
        padded = -(-rows // 64) * 64
        yield Observation(
            message=f"{rows} rows are not a multiple of {TENSOR_CORE_ROWS}; the next multiple of 64 is {padded}",
            help="pad the vocabulary before training if the head's matrix multiplication is slow"
            + (f": {command}" if (command := edit_command(evidence, "resize", "--pad-to-multiple-of 64")) else ""),
            tensors=(evidence.declaration.embedding,),
        )


@rule("BW211", "odd-norms", Severity.INFO)
def odd_norms(evidence: Evidence) -> Iterator[Observation]:
    """Some rows are far shorter or far longer than all others.

    What: the norm of these rows falls out of the table's distribution. It lies more than 3.5 times as far below the
    median as the 5% quantile does (or 6 times on a logarithmic scale), or more than 6 times as far above it as the 95%
    quantile. The padding row, rows of zeros, equal rows and rows that look never trained have findings of their own
    (BW204, BW206, BW205, BW208), which say so if groups of equal rows are that short. Tables of fewer than 256 other
    rows are not judged.

    Why it hurts: under a tied head the norm of a row scales its logit. Tokens with short rows are rarely predicted and
    need more steps to be learned; long rows take over the softmax.

    Example: tokens that were added as the mean of all rows, or drawn with `initializer_range`. In Gemma 3's table the
    mean has a norm of 0.47, and the median of all rows is 1.03.

    Fix: train these rows. To add tokens, use `bowline.resize_vocab(model, size, new_rows="scaled-mean")`, which gives
    the mean row the median norm.
    """
    pad = evidence.padding.id if evidence.padding else None
    sides = (
        (table.name, side, odd.median, [(int(row), float(norm)) for row, norm in zip(ids, norms, strict=True)])
        for table in evidence.tables
        if (odd := table.odd_norms)
        for side, ids, norms in (("below", odd.short, odd.short_norms), ("above", odd.long, odd.long_norms))
    )
    found = (
        (name, (side, median, tuple((row, norm) for row, norm in rows if row != pad)))
        for name, side, median, rows in sides
    )
    for names, (side, median, seen) in _together(found):
        if not seen:
            continue
        rows, norms = [row for row, _ in seen], [norm for _, norm in seen]
        one = len(rows) == 1
        yield Observation(
            message=(
                f"{_have(names)} {len(rows)} row{'s' * (not one)} with {'a norm' if one else 'norms'} far {side} all "
                f"others, {_span(norms)} where the median is {median:.2g} ({runs(rows)})"
                f"{tokens_of(evidence, rows)}"
            ),
            help=(
                f"train these rows{SCALED_MEAN}"
                if side == "below"
                else "train these rows on, or compare them with an earlier checkpoint"
            ),
            tensors=names,
        )


def _rows(evidence: Evidence) -> int | None:
    tensor = evidence.tensors.get(evidence.declaration.embedding or "")
    if tensor is None or len(tensor.shape) != 2:
        return None
    return tensor.shape[evidence.declaration.vocabulary.get(tensor.name, 0)]


def _head_is_tied(evidence: Evidence) -> bool:
    return any(tie.tie.target == evidence.declaration.head and tie.state in TIED for tie in evidence.ties)


def _other_roles(evidence: Evidence, number: int) -> list[str]:
    """The special tokens beside padding that have this id, as config, generation config and tokenizer name them.

    The end-of-text token comes first, and each role is named once.
    """
    from bowline.auditing.special_ids import special_ids

    tokenizer = evidence.tokenizer
    found: dict[str, str] = {}
    for path, value in special_ids(evidence.config or {}).items():
        if value == number:
            found.setdefault(_role(path), path)
    for path, value in special_ids(evidence.generation_config or {}).items():
        if value == number:
            found.setdefault(_role(path), f"{path} of generation_config.json")
    for part, token in (tokenizer.special if tokenizer else {}).items():
        if tokenizer is not None and tokenizer.ids.get(token) == number:
            found.setdefault(part, f"the tokenizer's {part}")
    found.pop("pad_token", None)
    return sorted(found.values(), key=lambda role: "eos_token" not in role)


def _role(path: str) -> str:
    """The role in the path of an id: `eos_token` in `text_config.eos_token_id[1]`."""
    role = path.rpartition(".")[2].partition("_id")[0]
    return "pad_token" if role == "padding_token" else role  # GGUF's word


def _why_trained(roles: list[str], head_tied: bool, *, trained: bool) -> str:
    """Why the padding row was trained, or the other tokens whose row it is as well."""
    if any("eos_token" in role for role in roles):
        as_label = ", so it is trained as a label" if head_tied else ""
        return f": it is also {roles[0]}{as_label}" if trained else f", and it is also {roles[0]}"
    reasons = []
    for role in roles:
        if "decoder_start_token" in role:
            reasons.append(f"every input of the decoder begins with it ({role})")
        else:
            reasons.append(f"it is also {role}")
    if trained and head_tied:
        reasons.append("a tied head trains it through the softmax's denominator")
    return (": " if trained else ", and ") + joined(reasons) if reasons else ""


def _looks_drawn(evidence: Evidence) -> bool:
    return any(table.name == evidence.declaration.embedding and table.drawn_std for table in evidence.tables)


def _together(found: Iterable[tuple[str, Seen]]) -> Iterator[tuple[tuple[str, ...], Seen]]:
    """What was found in tables, once for all tables in which it is the same; nothing where it is empty."""
    names: dict[Seen, list[str]] = {}
    for name, seen in found:
        if seen:
            names.setdefault(seen, []).append(name)
    for seen, tables in names.items():
        yield tuple(tables), seen


def _have(names: Sequence[str]) -> str:
    return f"{names[0]} has" if len(names) == 1 else f"{joined(names)} each have"


def _untrained(table: TableRows) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The signs by which rows look untrained, and the rows: short rows, and rows that are equal up to noise."""
    yield "they are short and point in one direction", tuple(int(row) for row in table.never_trained)
    groups = [group for group in table.alike if not _is_reported(group, table)]
    within = f"within each of {len(groups)} groups they" if len(groups) > 1 else "they"
    yield f"{within} are equal up to noise", tuple(int(row) for group in groups for row in group)


def _is_reported(group: Iterable[int], table: TableRows) -> bool:
    """Whether another finding has all of these rows: as short rows, or as rows that are equal byte for byte."""
    rows = {int(row) for row in group}
    reported: list[Iterable[int]] = [table.never_trained, *table.duplicates]
    return any(rows <= {int(row) for row in others} for others in reported)


def _largest(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return max(groups, key=len)


def _shortness(table: TableRows, rows: Iterable[int]) -> str:
    """The norms of equal rows if all of them are far shorter than the others; otherwise empty."""
    if table.odd_norms is None:
        return ""
    odd = dict(zip(map(int, table.odd_norms.grouped), map(float, table.odd_norms.grouped_norms), strict=True))
    norms = [odd.get(int(row)) for row in rows]
    short = [norm for norm in norms if norm is not None]
    if not short or len(short) < len(norms):
        return ""
    return f", far shorter than all others (norm {_span(short)} where the median is {table.odd_norms.median:.2g})"


def _span(norms: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{norm:.2g}" for norm in (min(norms), max(norms))))


def _share(rows: int, of: int) -> str:
    share = f"{rows / of:.1%}"
    return "under 0.1%" if share == "0.0%" else share
