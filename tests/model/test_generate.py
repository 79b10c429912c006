"Filling masks and sampling text: known distributions, schedules, fixed words, refusals."

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.model.config import modernbert_tiny
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.generate import draw_reveals, draw_words, fill_each_mask, fill_mask, sample_diffusion
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.data.rows import Vocabulary

torch.set_num_threads(1)
PAD, MASK = 0, 4
WORDS = Vocabulary(9, pad_token_id=PAD, mask_token_id=MASK, special_token_ids=(1, 2, 3))  # words 5 to 8
P = np.array([0.5, 0.3, 0.15, 0.05])  # of the words 5 to 8


class Known(torch.nn.Module):
    "The same known distribution at every position; special ids and padded ids score far higher."

    def __init__(self, padded: int = 3):
        super().__init__()
        special, beyond = torch.full((5,), 50.0), torch.full((padded,), 90.0)
        self.logits_V = torch.cat((special, torch.tensor(P).log().float(), beyond))
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        return SimpleNamespace(logits=self.logits_V.expand(*input_ids.shape, -1))


class AfterNeighbour(torch.nn.Module):
    "Position i is the word after position i - 1's (5 6 7 8 5 ...), where that is known, else any word."

    def forward(self, input_ids, attention_mask=None):
        left = input_ids.roll(1, dims=1)
        following = torch.where(left >= 5, (left - 5 + 1) % 4 + 5, torch.full_like(left, MASK))
        return SimpleNamespace(logits=40.0 * torch.nn.functional.one_hot(following, 9))


def gaps(rows: int, length: int) -> torch.Tensor:
    return torch.full((rows, length), MASK)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat", "the dog sat on the log"] * 20, vocab_size=80)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
    config = modernbert_tiny(vocab_size=len(tokenizer), max_position_embeddings=24, **shape)
    return BertLabForMaskedLM(config)


def by_hand(model, tokenizer, text: str) -> list[dict[str, float]]:
    "One text alone, all logits: the probability of each token at each mask."
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        p_LV = model.eval()(ids).logits[0].softmax(-1)
    places = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0]
    return [{tokenizer.decode([v]).strip(): p_LV[i, v].item() for v in range(len(tokenizer))} for i in places]


TEXTS = ["the [MASK] sat on the [MASK]", "[MASK] dog", "[MASK] [MASK] [MASK] sat on the log on the mat"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_mask_of_each_padded_text_is_answered_as_if_the_text_were_alone(model, tokenizer, side):
    tokenizer.padding_side = side
    answers = fill_each_mask(model, tokenizer, TEXTS, top_k=3)
    tokenizer.padding_side = "right"
    assert [len(masks) for masks in answers] == [2, 1, 3]
    for text, masks in zip(TEXTS, answers):
        for guesses, p in zip(masks, by_hand(model, tokenizer, text), strict=True):
            assert [m for _, m in guesses] == pytest.approx(sorted(p.values(), reverse=True)[:3], abs=1e-5)
            assert [p[word] for word, _ in guesses] == pytest.approx([m for _, m in guesses], abs=1e-5)


def test_one_mask_each_gives_one_list_each(model, tokenizer):
    texts = ["the [MASK] sat", "the cat sat on the [MASK]"]
    assert fill_mask(model, tokenizer, texts, top_k=4) == [
        masks[0] for masks in fill_each_mask(model, tokenizer, texts, top_k=4)
    ]


@pytest.mark.parametrize(
    "texts, options, said",
    [
        (["the [MASK]", "the cat"], {}, "text 1 must hold \\[MASK\\] at least once: 'the cat'"),
        (["the [MASK]", "cat " * 30 + "[MASK]"], {}, "text 1 has 33 tokens and the model reads 24"),
        ("the [MASK]", {}, "texts must be a list"),
        ([], {}, "texts must be a list"),
        (["the [MASK]"], {"top_k": 0}, "top_k must be from 1"),
        (["the [MASK]"], {"top_k": 10_000}, "top_k must be from 1"),
    ],
)
@pytest.mark.parametrize("fill", [fill_mask, fill_each_mask])
def test_what_cannot_be_filled_is_refused(model, tokenizer, fill, texts, options, said):
    with pytest.raises(ValueError, match=said):
        fill(model, tokenizer, texts, **options)


def test_fill_mask_refuses_two_masks_and_names_the_function_that_takes_them(model, tokenizer):
    with pytest.raises(ValueError, match=r"text 1 must hold exactly one \[MASK\].*2 \(fill_each_mask"):
        fill_mask(model, tokenizer, ["a [MASK]", "[MASK] [MASK]"])


def test_a_text_as_long_as_the_model_is_read(model, tokenizer):
    assert len(fill_mask(model, tokenizer, ["cat " * 21 + "[MASK]"])) == 1


def test_the_model_is_left_in_the_mode_it_was_in_even_after_an_error(model, tokenizer):
    class Broken(torch.nn.Module):
        def forward(self, **_):
            assert not self.training
            raise RuntimeError("broken")

    for mode in (True, False):
        model.train(mode)
        fill_mask(model, tokenizer, ["the [MASK]"])
        sample_diffusion(model, gaps(1, 3), Vocabulary(len(tokenizer), 0, 4, (1, 2, 3)), num_steps=2)
        assert model.training is mode
    broken = Broken().train()
    with pytest.raises(RuntimeError):
        sample_diffusion(broken, gaps(1, 3), WORDS, num_steps=1)
    assert broken.training


@pytest.mark.parametrize("num_steps", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_are_drawn_as_often_as_the_model_says(num_steps, temperature):
    n = 8000
    last = sample_diffusion(Known(), gaps(200, n // 200), WORDS, num_steps=num_steps, temperature=temperature)[-1]
    expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    measured = np.bincount(last.flatten(), minlength=9)[5:] / n
    # 9 x 4 comparisons at 4 standard errors: a right sampler fails all of them with odds of 1 in 400
    assert (np.abs(measured - expected) < 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_words_of_one_step_do_not_depend_on_each_other():
    last = sample_diffusion(Known(), gaps(6000, 2), WORDS, num_steps=1)[-1] - 5
    joint = np.zeros((4, 4))
    np.add.at(joint, (last[:, 0].numpy(), last[:, 1].numpy()), 1 / 6000)
    expected = np.outer(P, P)
    assert (np.abs(joint - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 6000)).all()


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_after_step_k_a_share_of_1_minus_k_over_n_is_hidden(num_steps):
    n = 6000
    states = sample_diffusion(Known(), gaps(100, n // 100), WORDS, num_steps=num_steps, seed=3)
    assert len(states) == num_steps + 1
    for step, state in enumerate(states):
        share = 1 - step / num_steps
        band = 4 * (share * (1 - share) / n) ** 0.5
        assert abs((state == MASK).float().mean().item() - share) <= band + 1e-9


def test_every_place_and_every_row_is_as_likely_to_be_first():
    revealed = draw_reveals(np.ones((4000, 8), dtype=bool), step=0, num_steps=4, seed=0)
    band = 4.5 * (0.25 * 0.75 / 4000) ** 0.5
    assert (np.abs(revealed.mean(0) - 0.25) < band).all()
    together = (revealed[:, 0] & revealed[:, 1]).mean()  # no coin knows its neighbour's
    assert abs(together - 1 / 16) < 4 * (1 / 16 * 15 / 16 / 4000) ** 0.5


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, MASK, 5, 8]), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([0, 0.7, 1.0, 5.0]),
    st.integers(0, 2**40),
)
def test_fixed_tokens_stay_and_nothing_is_hidden_again_and_all_is_filled(rows, num_steps, temperature, seed):
    ids = torch.tensor([*rows, [MASK] * 6])
    before = ids.clone()
    states = sample_diffusion(Known(), ids, WORDS, num_steps=num_steps, temperature=temperature, seed=seed)
    assert torch.equal(ids, before) and torch.equal(states[0], before)
    for earlier, later in zip(states, states[1:]):
        told = earlier != MASK
        assert torch.equal(later[told], earlier[told])
    drawn = states[-1][before == MASK]
    assert ((drawn >= 5) & (drawn <= 8)).all()


def test_temperature_0_takes_the_best_word_that_is_not_special_whatever_the_seed():
    for seed in range(3):
        last = sample_diffusion(Known(), gaps(3, 20), WORDS, num_steps=4, temperature=0, seed=seed)[-1]
        assert (last == 5).all()


def test_the_seed_decides_and_only_the_seed():
    draw = lambda seed: torch.stack(sample_diffusion(Known(), gaps(4, 30), WORDS, num_steps=6, seed=seed))
    torch.manual_seed(1)
    first = draw(0)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))


def test_a_row_is_the_same_alone_and_in_a_padded_batch():
    row = torch.tensor([[1, MASK, 5, MASK, MASK, MASK]])
    batch = torch.tensor([[1, MASK, 5, MASK, MASK, MASK, PAD, PAD], [MASK] * 8])
    alone = sample_diffusion(Known(), row, WORDS, num_steps=5)
    padded = sample_diffusion(Known(), batch, WORDS, attention_mask=(batch != PAD).long(), num_steps=5)
    for a, b in zip(alone, padded, strict=True):
        assert torch.equal(a[0], b[0, :6])


def test_rows_of_a_batch_differ():
    last = sample_diffusion(Known(), gaps(2, 60), WORDS, num_steps=3)[-1]
    assert not torch.equal(last[0], last[1])


def test_more_steps_than_masks_run_the_model_once_per_mask_at_most():
    model = Known()
    states = sample_diffusion(model, gaps(1, 3), WORDS, num_steps=500)
    assert len(states) == 501 and 1 <= model.calls <= 3 and MASK not in states[-1]


def test_words_revealed_earlier_are_seen_by_later_ones():
    ring = gaps(100, 8)
    ring[:, 0] = 5
    wrong = []
    for num_steps in (1, 2000):
        last = sample_diffusion(AfterNeighbour(), ring, WORDS, num_steps=num_steps)[-1]
        wrong.append(((last[:, 1:] - last[:, :-1]) % 4 != 1).float().mean().item())
    # all at once, 6 of 7 gaps guess among 4 words; one by one, a gap whose left is open guesses too
    assert wrong[0] == pytest.approx(6 / 7 * 3 / 4, abs=0.08)
    assert wrong[1] < wrong[0] - 0.1


def test_the_documents_of_a_row_reach_the_model():
    seen = []

    class Spy(Known):
        def forward(self, input_ids, attention_mask=None):
            seen.append(attention_mask)
            return super().forward(input_ids)

    documents = torch.tensor([[1, 1, 2, 2]])
    sample_diffusion(Spy(), gaps(1, 4), WORDS, attention_mask=documents, num_steps=1)
    assert torch.equal(seen[0], documents)


def test_a_model_of_the_library_writes_text_without_special_tokens(model, tokenizer):
    words = Vocabulary(len(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id, tuple(tokenizer.all_special_ids))
    ids = tokenizer("the [MASK] [MASK] on [MASK]", return_tensors="pt").input_ids
    last = sample_diffusion(model, ids, words, num_steps=8)[-1]
    gap = ids == tokenizer.mask_token_id
    assert torch.equal(last[~gap], ids[~gap]) and not set(last[gap].tolist()) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_steps": 0}, "num_steps must be a whole number, 1 or more, got 0"),
        ({"num_steps": 2.0}, "num_steps must be a whole number"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"temperature": -0.1}, "temperature must be finite, 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"input_ids": torch.tensor([MASK])}, r"input_ids must be \(B, L\), got \(1,\)"),
        ({"input_ids": torch.tensor([[5, 6]])}, r"input_ids has no \[MASK\], id 4"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding is never filled"),
        ({"vocabulary": Vocabulary(20, 0, 4)}, "the vocabulary has 20 ids, the model scores only 12"),
    ],
)
def test_what_cannot_be_sampled_is_refused(changes, said):
    arguments = {"input_ids": gaps(1, 3), "vocabulary": WORDS, "num_steps": 2, **changes}
    with pytest.raises(ValueError, match=said):
        sample_diffusion(Known(), **arguments)


def test_scores_of_half_precision_are_drawn_in_double():
    logits = torch.zeros(4, 9, dtype=torch.bfloat16)
    words = draw_words(logits, WORDS, 1.0, np.random.default_rng(0))
    assert words.shape == (4,) and words.min() >= 5


# ---- models of transformers -----------------------------------------------------------------------



def their_model(kind, tokenizer, tmp_path):
    "A model that plain transformers has loaded: ModernBERT from our own checkpoint, the others as they come."
    import transformers

    from bertlab.model.huggingface import save_model, their_class

    shape = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, vocab_size=len(tokenizer))
    if kind == "modernbert":
        made = BertLabForMaskedLM(modernbert_tiny(**shape, max_position_embeddings=24, initializer_range=0.3))
        place = save_model(made, tokenizer, tmp_path / "saved")
    else:
        offset = tokenizer.pad_token_id + 1 if kind == "roberta" else 0
        config = their_class(kind, "Config")(**shape, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None,
                                             max_position_embeddings=24 + offset, initializer_range=0.3)  # fmt: skip
        place = tmp_path / "saved"
        their_class(kind, "ForMaskedLM")(config).save_pretrained(place)
    return transformers.AutoModelForMaskedLM.from_pretrained(place)


@pytest.mark.parametrize("kind", ["modernbert", "bert", "roberta"])
def test_models_of_transformers_answer_what_their_pipeline_answers(kind, tokenizer, tmp_path):
    from transformers import pipeline

    torch.manual_seed(0)
    model = their_model(kind, tokenizer, tmp_path)
    filler = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=4)
    for text, found in zip(TEXTS, fill_each_mask(model, tokenizer, TEXTS, top_k=4), strict=True):
        alone = filler(text)
        alone = alone if isinstance(alone[0], list) else [alone]
        assert len(alone) == len(found)
        for theirs, ours in zip(alone, found):
            assert [word for word, _ in ours] == [one["token_str"].strip() for one in theirs]
            assert [p for _, p in ours] == pytest.approx([one["score"] for one in theirs], rel=1e-4)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_text_that_a_model_of_transformers_cannot_read_is_refused_by_its_length(kind, tokenizer, tmp_path):
    model = their_model(kind, tokenizer, tmp_path)
    words = "[MASK]" + " the" * 40
    with pytest.raises(ValueError, match="the model reads 24"):
        fill_mask(model, tokenizer, [words])
