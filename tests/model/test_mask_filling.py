"Filling masks: each alone, padded, in models of ours and of transformers, and what is refused."

import copy

import pytest
import torch
import transformers

from bertlab.model.config import modernbert_tiny
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.families import FAMILIES
from bertlab.model.generation import generate
from bertlab.model.mask_filling import eval_mode, fill_mask, fill_masks, max_input_length
from bertlab.model.heads import BertLabForMaskedLM


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
    return [
        {tokenizer.decode([v]).strip(): p_LV[i, v].item() for v in range(len(tokenizer))}
        for i in places
    ]


TEXTS = [
    "the [MASK] sat on the [MASK]",
    "[MASK] dog",
    "[MASK] [MASK] [MASK] sat on the log on the mat",
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_masks_of_padded_texts_are_filled_as_alone(model, tokenizer, side):
    tokenizer.padding_side = side
    answers = fill_masks(model, tokenizer, TEXTS, top_k=3)
    tokenizer.padding_side = "right"
    assert [len(masks) for masks in answers] == [2, 1, 3]
    for text, masks in zip(TEXTS, answers):
        for guesses, p in zip(masks, by_hand(model, tokenizer, text), strict=True):
            assert [m for _, m in guesses] == pytest.approx(
                sorted(p.values(), reverse=True)[:3], abs=1e-5
            )
            assert [p[word] for word, _ in guesses] == pytest.approx(
                [m for _, m in guesses], abs=1e-5
            )


@pytest.mark.parametrize("texts, options, words", [
    (["the [MASK]", "the cat"], {}, "text 1.*'the cat'"),
    (["the [MASK]", "cat " * 30 + "[MASK]"], {}, "text 1 .*33.*24"),
    (["a [MASK]", "[MASK] [MASK]"], {}, "text 1.*fill_masks"),
    (["the [MASK]"], {"top_k": 0}, "top_k=0"), (["the [MASK]"], {"batch_size": 0}, "batch_size=0"),
])  # fmt: skip
def test_texts_that_cannot_be_filled_are_named(model, tokenizer, texts, options, words):
    with pytest.raises(ValueError, match=words):
        fill_mask(model, tokenizer, texts, **options)


def test_a_token_that_the_model_has_no_row_for_is_refused(model, tokenizer):
    larger, texts = copy.deepcopy(tokenizer), ["the [MASK] sat"]
    larger.add_tokens(["zebra"])
    assert fill_mask(model, larger, texts) == fill_mask(model, tokenizer, texts)
    with pytest.raises(ValueError, match=f"vocab_size={len(tokenizer) + 1}"):
        fill_mask(model, larger, ["the [MASK] zebra"])


@pytest.mark.parametrize("ask", [fill_masks, generate])
def test_scores_that_are_no_numbers_are_refused(model, tokenizer, ask):
    broken = copy.deepcopy(model)
    broken.head.bias.data[7] = float("nan")
    with pytest.raises(ValueError, match="scores of BertLabForMaskedLM are NaN"):
        ask(broken, tokenizer, ["the [MASK] sat"])


def test_the_mode_is_restored_even_after_an_error(model):
    model.train().encoder.blocks[0].eval()  # a frozen part
    modes = [part.training for part in model.modules()]
    with pytest.raises(RuntimeError), eval_mode(model):
        assert not any(part.training for part in model.modules())
        raise RuntimeError("broken")
    assert [part.training for part in model.modules()] == modes


# ---- models of transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_transformers_models_answer_as_their_pipeline(family, tokenizer):
    torch.manual_seed(0)
    offset = tokenizer.pad_token_id + 1 if family == "roberta" else 0
    config = FAMILIES[family].get_class("Config")(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=None, max_position_embeddings=24 + offset, initializer_range=0.3,
    )  # fmt: skip
    model = FAMILIES[family].get_class("ForMaskedLM")(config).eval()
    filler = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=4)
    for text, masks in zip(TEXTS, fill_masks(model, tokenizer, TEXTS, top_k=4), strict=True):
        want = filler(text)
        want = want if isinstance(want[0], list) else [want]
        for predictions, result in zip(want, masks, strict=True):
            assert [word for word, _ in result] == [p["token_str"].strip() for p in predictions]
            assert [p for _, p in result] == pytest.approx(
                [p["score"] for p in predictions], rel=1e-4
            )


@pytest.mark.parametrize("family, longest", [("MPNet", 16), ("XLMRoberta", 16), ("Bert", 18)])
def test_a_row_is_as_long_as_the_table_of_positions_allows(family, longest):
    shape = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2)
    config = getattr(transformers, f"{family}Config")(
        **shape, vocab_size=20, pad_token_id=1, max_position_embeddings=18
    )
    model = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    assert max_input_length(model) == max_input_length(torch.compile(model)) == longest
    model(torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))
