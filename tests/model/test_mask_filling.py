"Filling masks: each alone, padded, in models of ours and of transformers, and what is refused."

import pytest
import torch

from bertlab.model.config import modernbert_tiny
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.mask_filling import fill_masks, fill_mask, max_input_length
from bertlab.model.heads import BertLabForMaskedLM

torch.set_num_threads(1)


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
    ("the [MASK]", {}, "texts"), ([], {}, "texts"), (["the [MASK]"], {"top_k": 0}, "top_k"),
    (["the [MASK]"], {"top_k": 10_000}, "top_k"), (["the [MASK]"], {"batch_size": 0}, "batch_size"),
])  # fmt: skip
def test_texts_that_cannot_be_filled_are_named(model, tokenizer, texts, options, words):
    with pytest.raises(ValueError, match=words):
        fill_mask(model, tokenizer, texts, **options)


def test_a_token_that_the_model_has_no_row_for_is_refused(model, tokenizer):
    import copy

    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["zebra"])
    assert fill_mask(model, larger, ["the [MASK] sat"]) == fill_mask(
        model, tokenizer, ["the [MASK] sat"]
    )
    with pytest.raises(ValueError, match=f"vocab_size={len(tokenizer) + 1}"):
        fill_mask(model, larger, ["the [MASK] zebra"])


def test_the_mode_is_restored_even_after_an_error(model, tokenizer):
    class Broken(torch.nn.Linear):
        def forward(self, **_):
            assert not self.training
            raise RuntimeError("broken")

    for mode in (True, False):
        model.train(mode)
        fill_mask(model, tokenizer, ["the [MASK]"])
        assert model.training is mode
    model.train().encoder.blocks[0].eval()  # a part that stays at rest while the others train
    modes = [part.training for part in model.modules()]
    fill_mask(model, tokenizer, ["the [MASK]"])
    assert [part.training for part in model.modules()] == modes
    broken = Broken(1, 1).train()
    broken.config = model.config
    with pytest.raises(RuntimeError, match="broken"):
        fill_mask(broken, tokenizer, ["the [MASK]"])
    assert broken.training


# ---- models of transformers -----------------------------------------------------------------------


def their_model(kind, tokenizer, tmp_path):
    "A model that plain transformers has loaded: ModernBERT from our own checkpoint, the others as they come."
    import transformers

    from bertlab.model.families import FAMILIES
    from bertlab.model.huggingface import save_model

    shape = dict(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
    )
    if kind == "modernbert":
        made = BertLabForMaskedLM(
            modernbert_tiny(**shape, max_position_embeddings=24, initializer_range=0.3)
        )
        place = save_model(made, tokenizer, tmp_path / "saved")
    else:
        offset = tokenizer.pad_token_id + 1 if kind == "roberta" else 0
        config = FAMILIES[kind].get_class("Config")(**shape, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None,
                                             max_position_embeddings=24 + offset, initializer_range=0.3)  # fmt: skip
        place = tmp_path / "saved"
        FAMILIES[kind].get_class("ForMaskedLM")(config).save_pretrained(place)
    return transformers.AutoModelForMaskedLM.from_pretrained(place)


@pytest.mark.parametrize("kind", ["modernbert", "bert", "roberta"])
def test_transformers_models_answer_as_their_pipeline(kind, tokenizer, tmp_path):
    from transformers import pipeline

    torch.manual_seed(0)
    model = their_model(kind, tokenizer, tmp_path)
    filler = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=4)
    for text, result in zip(TEXTS, fill_masks(model, tokenizer, TEXTS, top_k=4), strict=True):
        alone = filler(text)
        alone = alone if isinstance(alone[0], list) else [alone]
        assert len(alone) == len(result)
        for theirs, ours in zip(alone, result):
            assert [word for word, _ in ours] == [one["token_str"].strip() for one in theirs]
            assert [p for _, p in ours] == pytest.approx([one["score"] for one in theirs], rel=1e-4)


@pytest.mark.parametrize(
    "family, longest",
    [
        ("MPNet", 16),
        ("Roberta", 16),
        ("XLMRoberta", 16),
        ("Camembert", 16),
        ("Longformer", 16),
        ("Data2VecText", 16),
        ("Bert", 18),
        ("Electra", 18),
    ],
)
def test_a_row_is_as_long_as_the_table_of_positions_allows(family, longest):
    import transformers

    shape = dict(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=20,
        pad_token_id=1,
    )
    config = getattr(transformers, f"{family}Config")(**shape, max_position_embeddings=18)
    model = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    assert max_input_length(model) == longest
    if family != "Longformer":  # which pads rows to its window
        model(torch.full((1, longest), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("family, longest", [("Roberta", 16), ("Bert", 18)])
@pytest.mark.parametrize("targets", [["query"], ["position_embeddings", "query"]])
def test_a_wrapped_model_is_as_long_as_alone(family, longest, targets, tokenizer):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
                                                      vocab_size=len(tokenizer), pad_token_id=1, max_position_embeddings=18)  # fmt: skip
    alone = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    assert max_input_length(torch.compile(alone)) == longest
    model = peft.get_peft_model(alone, peft.LoraConfig(target_modules=targets, r=2)).eval()
    assert max_input_length(model) == longest
    with pytest.raises(ValueError, match=f"the model reads {longest}"):
        fill_mask(model, tokenizer, ["[MASK]" + " the" * (longest - 2)])
