"""Generation against transformers' own, token for token, and draws against their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from bowline.errors import UsageError
from bowline.models.generation import GenerationMixin
from bowline.models.generation.token_choice import candidates, ended
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.usefixtures("quiet_transformers", "one_thread")
NEW = 64
VOCAB = 61
PAD = 60


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models as small as these are only held up by a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(seed: int = 0, **more: Any) -> tuple[Any, Any]:
    """A GPT-2 here and the same at transformers', so wide in its draws that texts vary."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 96,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": PAD,
        **more,
    }
    theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    ours = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def t5_pair(seed: int = 0, **more: Any) -> tuple[Any, Any]:
    t5 = pytest.importorskip("bowline.models.t5")
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    theirs: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape)).eval()
    with torch.no_grad():
        theirs.shared.weight.mul_(0.05)  # or a token's own embedding outdoes all else, and it repeats itself
    ours = t5.T5ForConditionalGeneration(t5.T5Config(**shape)).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def prompts(rows: int = 3, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompts(), torch.ones(3, 9, dtype=torch.long)
    for row, padding in enumerate((0, 3, 6)):
        ids[row, :padding], mask[row, :padding] = pad, 0
    return ids, mask


def right_padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = left_padded(pad=0)
    return ids.flip(1), mask.flip(1)


def same(ours: Any, theirs: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    got = ours.generate(ids, **options)
    expected = theirs.generate(ids, do_sample=False, **options)
    assert got.tolist() == expected.tolist()
    return torch.as_tensor(got)


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_of_gpt2_is_transformers_for_64_tokens(seed: int) -> None:
    got = same(*pair(seed, eos_token_id=None), prompts(), max_new_tokens=NEW)
    assert got.shape == (3, 9 + NEW)
    assert len(set(got[0, 9:].tolist())) > 5, "a text that repeats one token shows little"


def test_greedy_of_left_padded_rows_is_transformers_and_that_of_each_row_alone() -> None:
    ours, theirs = pair(2, eos_token_id=None)
    ids, mask = left_padded()
    got = same(ours, theirs, ids, attention_mask=mask, max_new_tokens=NEW)
    for row, padding in enumerate((0, 3, 6)):
        alone = ours.generate(ids[row : row + 1, padding:], max_new_tokens=NEW)
        assert alone[0].tolist() == got[row, padding:].tolist()


def test_padding_is_known_by_its_token_where_no_mask_is_given() -> None:
    ours, theirs = pair(2)
    ids, mask = left_padded()
    got = same(ours, theirs, ids, max_new_tokens=NEW)
    assert got.tolist() == ours.generate(ids, attention_mask=mask, max_new_tokens=NEW).tolist()


def test_rows_that_end_early_are_padded_as_transformers_pads_them() -> None:
    ours, theirs = pair(3, eos_token_id=None)
    free = ours.generate(prompts(), max_new_tokens=NEW)[:, 9:].tolist()
    end = next(token for token in free[0] if token not in free[1][:30])
    got = same(ours, theirs, prompts(), max_new_tokens=NEW, eos_token_id=[end, 2])
    assert (got[0] == PAD).sum() > 20


def test_everything_stops_once_all_rows_have_ended() -> None:
    ours, theirs = pair(3, eos_token_id=None)
    end = int(ours.generate(prompts(1), max_new_tokens=NEW)[0, 14])
    assert same(ours, theirs, prompts(1), max_new_tokens=NEW, eos_token_id=end).shape[1] <= 15


@pytest.mark.parametrize("options", [{"min_new_tokens": 30}, {"repetition_penalty": 1.7}, {"max_length": 40}])
def test_options_of_greedy_are_transformers(options: dict[str, Any]) -> None:
    ours, theirs = pair(3)
    ids, mask = left_padded()
    free = ours.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=[])
    length = {} if "max_length" in options else {"max_new_tokens": NEW}
    same(ours, theirs, ids, attention_mask=mask, eos_token_id=int(free[0, 12]), **options, **length)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_that_are_not_to_begin_are_left_out_of_the_first_step_alone(num_beams: int) -> None:
    ours, theirs = pair(3, eos_token_id=None)
    free = ours.generate(prompts(), max_new_tokens=NEW, num_beams=num_beams)
    first = sorted(set(free[:, 9].tolist()))
    got = same(ours, theirs, prompts(), max_new_tokens=NEW, num_beams=num_beams, begin_suppress_tokens=first)
    assert not set(got[:, 9].tolist()) & set(first)
    assert set(got[:, 10:].flatten().tolist()) & set(first)


def test_twenty_tokens_are_new_where_nothing_is_said() -> None:
    assert same(*pair(eos_token_id=None), prompts()).shape == (3, 29)


def test_without_a_cache_the_ids_are_the_same() -> None:
    ours, _ = pair(4, eos_token_id=None)
    ids, mask = left_padded()
    for options in ({}, {"num_beams": 3}):
        one, other = (
            ours.generate(ids, attention_mask=mask, max_new_tokens=24, use_cache=use_cache, **options)
            for use_cache in (True, False)
        )
        assert one.tolist() == other.tolist()


def test_a_masked_padding_logit_is_never_chosen() -> None:
    ours, _ = pair(eos_token_id=None)
    ids = prompts()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16}
    likely = int(ours.generate(ids, **options)[0, 12])
    object.__setattr__(ours.config, "pad_token_id", likely)
    assert (ours.generate(ids, **options)[:, 9:] == likely).any()
    object.__setattr__(ours.config, "pad_logit", "mask")
    for num_beams in (1, 3):
        assert not (ours.generate(ids, num_beams=num_beams, **options)[:, 9:] == likely).any()


def test_gradients_are_as_they_were_after_generation() -> None:
    ours, _ = pair()
    ids = ours.generate(prompts(), max_new_tokens=4)
    assert not ids.is_inference()
    ours(ids, labels=ids).loss.backward()
    assert torch.is_grad_enabled()


# --- beams ----------------------------------------------------------------------------------------------------------

BEAMS = [
    {"num_beams": 4},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.6},
    {"num_beams": 2, "early_stopping": False, "length_penalty": 2.0},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
]


@pytest.mark.parametrize("options", BEAMS)
@pytest.mark.parametrize("ending", [False, True])
def test_beams_of_gpt2_are_transformers_for_64_tokens(options: dict[str, Any], ending: bool) -> None:
    ours, theirs = pair(5, eos_token_id=7 if ending else None)
    same(ours, theirs, prompts(), max_new_tokens=NEW, **options)


def test_beams_over_left_padded_rows_are_transformers() -> None:
    ours, theirs = pair(6)
    ids, mask = left_padded()
    same(ours, theirs, ids, attention_mask=mask, max_new_tokens=NEW, num_beams=3)


def test_beams_with_several_ends_and_penalties_are_transformers() -> None:
    ours, theirs = pair(7)
    options = {"num_beams": 3, "repetition_penalty": 1.3, "min_new_tokens": 5}
    same(ours, theirs, prompts(), max_new_tokens=NEW, eos_token_id=[7, 11, 30], **options)


def test_more_beams_find_a_likelier_text() -> None:
    ours, _ = pair(8, eos_token_id=None)

    def log_probability(ids: torch.Tensor) -> float:
        scores = ours(ids).logits[:, 8:-1].log_softmax(-1)
        return float(scores.gather(2, ids[:, 9:, None]).sum())

    greedy = ours.generate(prompts(1), max_new_tokens=12)
    assert log_probability(ours.generate(prompts(1), max_new_tokens=12, num_beams=8)) >= log_probability(greedy)


LONG = {"max_new_tokens": NEW, "min_new_tokens": NEW - 1, "repetition_penalty": 1.5}

# --- an encoder before it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_of_t5_is_transformers_for_64_tokens(more: dict[str, Any], padded: bool) -> None:
    ours, theirs = t5_pair(**more)
    ids, mask = right_padded() if padded else (prompts(), None)
    got = same(ours, theirs, ids, attention_mask=mask, **LONG)
    assert got.shape == (3, 1 + NEW)
    assert len(set(got.flatten().tolist())) > 5


@pytest.mark.parametrize("options", BEAMS)
@pytest.mark.parametrize("end", [1, 7])
def test_beams_of_t5_are_transformers_for_64_tokens(options: dict[str, Any], end: int) -> None:
    ours, theirs = t5_pair(3, eos_token_id=end)
    ids, mask = right_padded()
    same(ours, theirs, ids, attention_mask=mask, max_new_tokens=NEW, **options)
    same(ours, theirs, ids, max_new_tokens=9, **options)  # padding tokens that nobody says are padding


def test_t5_streams_and_needs_no_cache() -> None:
    ours, _ = t5_pair(2)
    whole = ours.generate(prompts(1), max_new_tokens=20)
    assert list(ours.stream(prompts(1), max_new_tokens=20)) == whole[0, 1:].tolist()
    assert ours.generate(prompts(1), max_new_tokens=20, use_cache=False).tolist() == whole.tolist()
    beams = [ours.generate(prompts(2), max_new_tokens=20, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert beams[0].tolist() == beams[1].tolist()


# --- without positions ----------------------------------------------------------------------------------------------


class LSTMForTransformers(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Our LSTM given to transformers' own search, which reads the whole text again at every step."""

    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, model: Any) -> None:
        options: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False}
        config = transformers.PretrainedConfig(**options)
        super().__init__(config)
        self.model = model
        self.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=PAD, use_cache=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **more: Any) -> Any:
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 4, "length_penalty": 2.0}])
def test_the_lstm_is_searched_as_transformers_would_search_it_for_64_tokens(options: dict[str, Any]) -> None:
    lstm = pytest.importorskip("bowline.models.lstm")
    torch.manual_seed(5)
    config = lstm.LSTMConfig(vocab_size=VOCAB, hidden_size=16, initializer_range=1.0, eos_token_id=1, pad_token_id=PAD)
    model = lstm.LSTMLMHeadModel(config).eval()
    got = same(model, LSTMForTransformers(model), prompts(), max_new_tokens=NEW, **options)
    assert len(set(got[:, 9:].flatten().tolist())) > 5


def test_the_lstm_generates_the_same_with_its_state_and_without() -> None:
    lstm = pytest.importorskip("bowline.models.lstm")
    torch.manual_seed(0)
    model = lstm.LSTMLMHeadModel(lstm.LSTMConfig(vocab_size=VOCAB, hidden_size=16, initializer_range=1.0)).eval()
    ids, mask = left_padded()
    for options in ({}, {"num_beams": 3}):
        one, other = (
            model.generate(ids, attention_mask=mask, max_new_tokens=24, use_cache=cache, pad_token_id=0, **options)
            for cache in (True, False)
        )
        assert one.tolist() == other.tolist()


# --- stops and streams ----------------------------------------------------------------------------------------------


def test_stop_sequences_end_a_text_where_they_first_appear() -> None:
    ours, _ = pair(9, eos_token_id=None)
    free = ours.generate(prompts(1), max_new_tokens=NEW)[0].tolist()
    sequence = free[20:23]
    first = next(at for at in range(9, len(free)) if free[at : at + 3] == sequence)
    for num_beams in (1, 2):
        got = ours.generate(prompts(1), max_new_tokens=NEW, stop=[sequence], num_beams=num_beams)[0].tolist()
        if num_beams == 1:
            assert got == free[: first + 3]
    single = ours.generate(prompts(1), max_new_tokens=NEW, stop=free[15])[0].tolist()
    assert single == free[: free.index(free[15], 9) + 1]


def test_a_stop_sequence_must_be_new_as_a_whole() -> None:
    made = torch.tensor([[5, 6, 7], [6, 7, 5], [7, 7, 7]])
    assert ended(made, ((6, 7),)).tolist() == [True, False, False]
    assert ended(made, ((6, 7), (5,))).tolist() == [True, True, False]
    assert ended(made[:, :1], ((6, 7),)).tolist() == [False, False, False]


def test_a_stream_gives_the_ids_that_generate_gives() -> None:
    ours, _ = pair(9)
    whole = ours.generate(prompts(1), max_new_tokens=NEW)[0, 9:].tolist()
    steps: list[list[int]] = []
    ours.generate(prompts(1), max_new_tokens=NEW, streamer=steps.append)
    assert [token for step in steps for token in step] == whole
    assert list(ours.stream(prompts(1), max_new_tokens=NEW)) == whole


def test_a_stream_computes_no_further_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(eos_token_id=None)
    calls = []
    ours.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    stream = ours.stream(prompts(1), max_new_tokens=NEW)
    assert torch.is_grad_enabled()
    next(stream), next(stream)
    assert calls == [False, False]
    assert torch.is_grad_enabled(), "a stream that is waiting leaves gradients on"


# --- draws ----------------------------------------------------------------------------------------------------------


def kept(probabilities: list[float], top_k: int | None, top_p: float | None) -> dict[int, float]:
    """What may be drawn, and how likely, one token after the other."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[: top_k or len(probabilities)]
    whole = sum(probabilities[token] for token in order)
    chosen: list[int] = []
    for token in order:
        if sum(probabilities[one] for one in chosen) / whole >= (top_p or 1.0):
            break
        chosen.append(token)
    total = sum(probabilities[token] for token in chosen)
    return {token: probabilities[token] / total for token in chosen}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (7, None), (None, 0.8), (9, 0.6), (1, None), (None, 1e-9)])
def test_filters_keep_what_brute_force_keeps(temperature: float, top_k: int | None, top_p: float | None) -> None:
    scores = 2 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    probabilities, tokens = candidates(scores, temperature=temperature, top_k=top_k, top_p=top_p)
    for row in range(5):
        truth = (scores[row].double() / temperature).softmax(-1).tolist()
        ids = tokens[row].tolist() if tokens is not None else range(40)
        got = {int(token): p for token, p in zip(ids, probabilities[row].tolist(), strict=True) if p > 0}
        expected = kept(truth, top_k, top_p)
        assert got.keys() == expected.keys()
        assert all(math.isclose(got[token], expected[token], rel_tol=1e-4) for token in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_temperature_is_too_low_or_too_high(dtype: torch.dtype) -> None:
    scores = torch.tensor([[3.0, 4.0, -torch.inf, 4.0]], dtype=dtype)
    for temperature, share in ((1e-300, [0.0, 0.5, 0.0, 0.5]), (1e-40, [0.0, 0.5, 0.0, 0.5]), (1e300, [1 / 3] * 4)):
        probabilities, _ = candidates(scores, temperature=temperature)
        expected = torch.tensor([share]).masked_fill(scores == -torch.inf, 0.0)
        assert (probabilities.float() - expected).abs().max() < 0.01


@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.7}, {"top_k": 10, "top_p": 0.7, "temperature": 2.0}])
def test_draws_are_distributed_as_the_probabilities_say(options: dict[str, Any]) -> None:
    """Pearson's statistic over 4000 draws: beyond mean + 5 standard deviations once in more than 10,000 seeds."""
    ours, _ = pair(eos_token_id=None, initializer_range=0.15)
    draws = 4000
    ids = prompts(1).expand(draws, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = ours.generate(ids, max_new_tokens=1, do_sample=True, generator=generator, **options)[:, -1]
    scores = ours(prompts(1)).logits[0, -1].double() / options.get("temperature", 1.0)
    expected = kept(scores.softmax(-1).tolist(), options.get("top_k"), options.get("top_p"))
    counts = torch.bincount(drawn, minlength=VOCAB).tolist()
    assert {token for token, count in enumerate(counts) if count} <= expected.keys()
    statistic = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_a_seed_draws_the_same_again_and_another_something_else() -> None:
    ours, _ = pair(eos_token_id=None)

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "generator": generator}
        return [int(token) for token in ours.generate(prompts(1), max_new_tokens=32, **options)[0]]

    assert drawn(1) == drawn(1) != drawn(2)


# --- what means nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1"),
        ({"max_new_tokens": 3, "max_length": 30}, "max_new_tokens=3 and max_length=30"),
        ({"max_length": 9}, "max_length=9: expected more than the 9 tokens"),
        ({"begin_suppress_tokens": list(range(VOCAB))}, "expected to leave one token to begin with"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens=9: expected at most the 3"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0: expected a number above 0"),
        ({"do_sample": True, "temperature": math.nan}, "temperature=nan"),
        ({"do_sample": True, "top_p": 0.0}, "top_p=0.0: expected above 0 and at most 1"),
        ({"do_sample": True, "top_p": 1.1}, "top_p=1.1"),
        ({"do_sample": True, "top_k": 0}, "top_k=0: expected a whole number from 1"),
        ({"num_beams": 0}, "num_beams=0: expected a whole number from 1"),
        ({"num_beams": 2, "do_sample": True}, "beams are not sampled"),
        ({"top_k": 3}, "do_sample is False"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"early_stopping": "always"}, "early_stopping='always'"),
        ({"stop": [[]]}, "stop has an empty sequence"),
        ({"streamer": print}, "a stream of 3 rows"),
        ({"attention_mask": torch.ones(3, 8)}, r"attention_mask \(3, 8\): expected \(3, 9\)"),
        ({"attention_mask": torch.tensor([[1] * 9, [0] * 9, [1] * 9])}, "row 1 of the batch has only padding"),
        ({"attention_mask": torch.tensor([[1] * 9, [1] * 9, [1] * 8 + [0]])}, "row 2 ends in padding"),
        (
            {"max_new_tokens": 89},
            "the prompt has 9 tokens and 89 are to be added, but the table of positions has 96 rows",
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    ours, _ = pair()
    ours.register_forward_pre_hook(lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(UsageError, match=message):
        ours.generate(prompts(), **options)


def test_the_table_of_positions_can_be_filled_to_its_end() -> None:
    ours, _ = pair(eos_token_id=None)
    assert ours.generate(prompts(), max_new_tokens=88).shape == (3, 97)


def test_a_prompt_that_is_empty_or_too_long_is_refused_with_both_numbers() -> None:
    ours, _ = pair()
    with pytest.raises(UsageError, match="an empty batch"):
        ours.generate(torch.zeros(0, 4, dtype=torch.long))
    with pytest.raises(UsageError, match="an empty batch"):
        ours.generate(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(UsageError, match="the prompt has 97 tokens, and the table of positions has 96 rows"):
        ours.generate(prompts(1, 97))
    with pytest.raises(UsageError, match="a stream of 1 rows and num_beams=2: expected one row and one beam"):
        ours.stream(prompts(1), num_beams=2)


def test_rows_that_stop_early_need_a_padding_token() -> None:
    ours, _ = pair(eos_token_id=None, pad_token_id=None)
    with pytest.raises(UsageError, match="the config has no pad_token_id"):
        ours.generate(prompts(), stop=[3])
    assert isinstance(ours, GenerationMixin)
