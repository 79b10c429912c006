"Text to text: modes, gaps, ends, addresses, and models of every kind."

import itertools

import numpy as np
import pytest
import torch

from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.families import FAMILIES
from bertlab.model.generation import GAP, generate, generate_with_steps, vocabulary_of
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.model.huggingface import from_huggingface
from bertlab.model.sampling import SAMPLERS

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a bird sang in a tree"] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=90)
SHAPE = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
             vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id, max_position_embeddings=40,
             initializer_range=0.4)  # fmt: skip
MASK, SEP = TOKENIZER.mask_token_id, TOKENIZER.sep_token_id


def build(cls=BertLabForMaskedDiffusion):
    torch.manual_seed(0)
    return cls(modernbert_tiny(**SHAPE))


MODEL = build()
PROMPTS = [
    "the [MASK] sat on the [MASK]",
    "a bird",
    f"the {GAP} on the log",
    "[MASK] dog sat",
    "the cat sat on",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_text_does_not_depend_on_its_batch(sampler):
    options = dict(sampler=sampler, max_new_tokens=9, max_gap=3, seed=4)
    texts = generate(MODEL, TOKENIZER, PROMPTS, **options)
    for size in (1, 4):
        assert generate(MODEL, TOKENIZER, PROMPTS, batch_size=size, **options) == texts
    assert generate(MODEL, TOKENIZER, PROMPTS, **{**options, "seed": 5}) != texts


@pytest.mark.parametrize("cls", [BertLabForMaskedLM, BertLabForEnhancedMaskedLM])
def test_every_objective_writes_no_special_tokens(cls):
    results = generate_with_steps(build(cls), TOKENIZER, PROMPTS[:2], max_new_tokens=5)
    for result in results:
        assert not {*result.ids[1:-1].tolist()} & {*TOKENIZER.all_special_ids}
    assert results[1].text.startswith("a bird")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_transformers_models_write_alike_after_conversion(family):
    offset = TOKENIZER.pad_token_id + 1 if family == "roberta" else 0
    shape = {**SHAPE, "max_position_embeddings": 40 + offset}
    torch.manual_seed(1)
    reference = FAMILIES[family].get_class("ForMaskedLM")(
        FAMILIES[family].get_class("Config")(**shape)
    )
    options = dict(max_new_tokens=6, seed=3)
    texts = generate(reference.eval(), TOKENIZER, PROMPTS, **options)
    assert texts == generate(from_huggingface(reference), TOKENIZER, PROMPTS, **options)
    with pytest.raises(ValueError, match="the model reads 40"):
        generate(reference, TOKENIZER, ["the"], max_new_tokens=40)


def test_the_prompt_stays_and_lengths_are_as_requested():
    prompt = "the [MASK] sat on the [MASK]"
    [result] = generate_with_steps(MODEL, TOKENIZER, [prompt], num_steps=2)
    ids = np.array(TOKENIZER(prompt)["input_ids"])
    assert (result.ids == ids)[ids != MASK].all()
    assert result.states.shape == (3, len(ids)) and (result.states[0] == ids).all()
    [result] = generate_with_steps(MODEL, TOKENIZER, ["the cat"], max_new_tokens=7)
    assert len(result.ids) == 2 + 2 + 7 and not result.ended and len(result.states) == 8


def test_an_answer_is_what_follows_the_prompt():
    [result] = generate_with_steps(MODEL, TOKENIZER, ["the cat"], mode="answer", max_new_tokens=5)
    prompt = TOKENIZER("the cat")["input_ids"]  # [CLS] the cat [SEP]
    assert result.ids[: len(prompt)].tolist() == prompt and len(result.ids) == len(prompt) + 6
    assert result.text == TOKENIZER.decode(result.ids[len(prompt) : -1])


def test_rewriting_masks_the_share_and_keeps_the_rest():
    text, options = "the cat sat on the mat the dog sat on", dict(mode="rewrite", rewrite_share=0.5)
    [result] = generate_with_steps(MODEL, TOKENIZER, [text], **options)
    before, masked = np.array(TOKENIZER(text)["input_ids"]), result.states[0] == MASK
    assert masked.sum() == round(0.5 * (len(before) - 2))
    assert (result.ids[~masked] == before[~masked]).all()
    [another] = generate_with_steps(MODEL, TOKENIZER, [text], seed=1, **options)
    assert (another.states[0] != result.states[0]).any()


def test_a_gap_gets_the_length_that_fits_best():
    class OneLength(torch.nn.Module):
        "Predicts 'on' only three tokens after 'sat'; everything else is equally likely."

        def __init__(self):
            super().__init__()
            self.config, self.weight = MODEL.config, torch.nn.Parameter(torch.zeros(1))
            self.sat, self.on = (TOKENIZER.convert_tokens_to_ids(w) for w in ("sat", "on"))

        def forward(self, input_ids, attention_mask=None):
            logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
            is_after = input_ids.roll(4, 1) == self.sat
            logits[..., self.on] = torch.where(is_after, 8.0, -8.0)
            return type("Out", (), {"logits": logits})

    prompt = f"cat sat {GAP} on the mat"
    [result] = generate_with_steps(OneLength(), TOKENIZER, [prompt], max_gap=6)
    assert (result.states[0] == MASK).sum() == 3


def test_a_text_may_end_early_only_where_it_is_allowed_to():
    class Ends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.weight = MODEL.config, torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask=None):
            logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
            logits[:, 6:, SEP] = 50.0  # from position 6 on there is nothing more to say
            return type("Out", (), {"logits": logits})

    ended = generate_with_steps(Ends(), TOKENIZER, ["the cat"], max_new_tokens=12, ends=True)[0]
    assert ended.ended and len(TOKENIZER(ended.text, add_special_tokens=False)["input_ids"]) <= 5
    assert (ended.ids[6:] == SEP).all() and (ended.ids[3:6] != SEP).all()
    full = generate_with_steps(Ends(), TOKENIZER, ["the cat"], max_new_tokens=12)[0]
    assert not full.ended and (full.ids[1:-1] != SEP).all()


def test_the_likelihood_is_the_chain_rule_in_order():
    prompt, total = "the [MASK] sat [MASK] the [MASK]", 0.0
    [result] = generate_with_steps(MODEL, TOKENIZER, [prompt], seed=2)
    special_V = torch.from_numpy(vocabulary_of(TOKENIZER).is_special_V)
    for before, after in itertools.pairwise(result.states):
        with torch.no_grad():
            logits = MODEL.eval()(torch.from_numpy(before)[None]).logits[0].double()
        logits[:, special_V] = -torch.inf
        [position] = np.flatnonzero(before != after)
        total += logits.log_softmax(-1)[position, after[position]].item()
    assert result.log_likelihood == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("options, name", [
    (dict(mode="infil"), "did you mean 'infill'"), (dict(mode="infill"), "nothing to infill"),
    (dict(max_new_tokens=0), "max_new_tokens=0"), (dict(batch_size=0), "batch_size=0"),
    (dict(max_new_tokens=60), "max_position_embeddings"), (dict(sampler="none"), "sampler='none'"),
    (dict(temprature=1), "did you mean 'temperature'"), (dict(rewrite_share=0), "rewrite_share"),
    (dict(prompts=[""], mode="rewrite"), "nothing to rewrite"),
    (dict(block_size=2, num_steps=3, max_new_tokens=12), "num_steps=3"),
])  # fmt: skip
def test_wrong_options_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        generate(MODEL, TOKENIZER, **{"prompts": ["the cat"], **options})


@pytest.mark.parametrize("framed", [True, False])
def test_token_ids_give_the_token_ids_of_the_finished_rows(framed):
    prompts, options = PROMPTS[:2], {"max_new_tokens": 5, "seed": 3}
    rows = TOKENIZER(prompts, add_special_tokens=framed)["input_ids"]
    if framed:
        rows = TOKENIZER.pad({"input_ids": rows}, return_tensors="pt")["input_ids"]
    results = generate_with_steps(MODEL, TOKENIZER, prompts, **options)
    generated = generate(MODEL, TOKENIZER, rows, **options)
    assert generated == [result.ids.tolist() for result in results]
    decoded = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in generated]
    assert decoded == [result.text for result in results]
    with pytest.raises(ValueError, match="prompt.*token ids"):
        generate(MODEL, TOKENIZER, [[0.5, 1.0]])
