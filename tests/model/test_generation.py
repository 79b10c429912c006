"Text to text: modes, gaps, ends, addresses, and models of every kind."

import numpy as np
import pytest
import torch

from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.generation import GAP, generate, generate_with_steps, vocabulary_of
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedDiffusion,
    BertLabForMaskedLM,
)
from bertlab.model.sampling import SAMPLERS

torch.set_num_threads(1)
TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a bird sang in a tree"] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=90)
SHAPE = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
             vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id, max_position_embeddings=40,
             initializer_range=0.4)  # fmt: skip
MASK, SEP = TOKENIZER.mask_token_id, TOKENIZER.sep_token_id


def made(kind=BertLabForMaskedDiffusion, seed=0):
    torch.manual_seed(seed)
    return kind(modernbert_tiny(**SHAPE))


MODEL = made()
PROMPTS = [
    "the [MASK] sat on the [MASK]",
    "a bird",
    f"the {GAP} on the log",
    "[MASK] dog sat",
    "the cat sat on",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_texts_do_not_depend_on_how_many_are_written_at_once(sampler):
    options = dict(sampler=sampler, max_new_tokens=9, max_gap=3, seed=4)
    whole = generate(MODEL, TOKENIZER, PROMPTS, **options)
    for size in (1, 2, 4):
        assert generate(MODEL, TOKENIZER, PROMPTS, batch_size=size, **options) == whole
    assert generate(MODEL, TOKENIZER, PROMPTS, **{**options, "seed": 5}) != whole


@pytest.mark.parametrize(
    "kind", [BertLabForMaskedLM, BertLabForMaskedDiffusion, BertLabForEnhancedMaskedLM]
)
def test_every_objective_writes(kind):
    result = generate_with_steps(made(kind), TOKENIZER, PROMPTS[:2], max_new_tokens=5)
    for one in result:
        assert MASK not in one.ids and not set(one.ids[1:-1].tolist()) & set(
            TOKENIZER.all_special_ids
        )
    assert result[1].text.startswith("a bird")


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_transformers_models_write_alike_after_conversion(kind):
    from bertlab.model.families import FAMILIES
    from bertlab.model.huggingface import from_huggingface

    offset = TOKENIZER.pad_token_id + 1 if kind == "roberta" else 0
    shape = {**SHAPE, "max_position_embeddings": 40 + offset}
    ends = (None, None) if kind != "modernbert" else (TOKENIZER.cls_token_id, SEP)
    more = dict(
        zip(
            (
                "bos_token_id",
                "eos_token_id",
                *(("cls_token_id", "sep_token_id") if kind == "modernbert" else ()),
            ),
            ends * 2,
        )
    )
    torch.manual_seed(1)
    config = FAMILIES[kind].get_class("Config")(**shape, **more)
    theirs = FAMILIES[kind].get_class("ForMaskedLM")(config).eval()
    requested = dict(max_new_tokens=6, seed=3)
    assert generate(theirs, TOKENIZER, PROMPTS, **requested) == generate(
        from_huggingface(theirs), TOKENIZER, PROMPTS, **requested
    )
    with pytest.raises(ValueError, match="the model reads 40"):
        generate(theirs, TOKENIZER, ["the"], max_new_tokens=40)


def test_what_is_given_stays_and_lengths_are_as_asked():
    one = generate_with_steps(MODEL, TOKENIZER, ["the [MASK] sat on the [MASK]"], num_steps=2)[0]
    given = TOKENIZER("the [MASK] sat on the [MASK]")["input_ids"]
    assert [a for a, b in zip(one.ids, given) if b != MASK] == [b for b in given if b != MASK]
    assert one.states.shape == (3, len(given)) and (one.states[0] == given).all()
    more = generate_with_steps(MODEL, TOKENIZER, ["the cat"], max_new_tokens=7)[0]
    assert len(more.ids) == 2 + 2 + 7 and not more.ended and len(more.states) == 8


def test_an_answer_is_what_stands_behind_the_prompt():
    one = generate_with_steps(MODEL, TOKENIZER, ["the cat"], mode="answer", max_new_tokens=5)[0]
    prompt = TOKENIZER("the cat")["input_ids"]
    assert one.ids[: len(prompt)].tolist() == prompt  # [CLS] the cat [SEP]
    assert (
        one.text == TOKENIZER.decode(one.ids[len(prompt) : -1]) and len(one.ids) == len(prompt) + 6
    )


def test_rewriting_hides_the_share_and_keeps_the_rest():
    text = "the cat sat on the mat the dog sat on"
    one = generate_with_steps(MODEL, TOKENIZER, [text], mode="rewrite", rewrite_share=0.5)[0]
    before, hidden = np.array(TOKENIZER(text)["input_ids"]), one.states[0] == MASK
    assert (
        hidden.sum() == round(0.5 * (len(before) - 2))
        and (one.ids[~hidden] == before[~hidden]).all()
    )
    other = generate_with_steps(
        MODEL, TOKENIZER, [text], mode="rewrite", rewrite_share=0.5, seed=1
    )[0]
    assert (other.states[0] != one.states[0]).any()


def test_a_gap_gets_the_length_that_fits_best():
    class OneLength(torch.nn.Module):
        "Likes 'on' only where three tokens stand between 'sat' and it; all else alike."

        def __init__(self):
            super().__init__()
            self.config, self.weight = MODEL.config, torch.nn.Parameter(torch.zeros(1))
            self.sat, self.on = (TOKENIZER.convert_tokens_to_ids(w) for w in ("sat", "on"))

        def forward(self, input_ids, attention_mask=None):
            logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
            liked = input_ids.roll(4, 1) == self.sat
            logits[..., self.on] = torch.where(liked, 8.0, -8.0)
            return type("Out", (), {"logits": logits})

    one = generate_with_steps(OneLength(), TOKENIZER, [f"cat sat {GAP} on the mat"], max_gap=6)[0]
    assert (one.states[0] == MASK).sum() == 3


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
    one = generate_with_steps(MODEL, TOKENIZER, ["the [MASK] sat [MASK] the [MASK]"], seed=2)[0]
    vocabulary, total = vocabulary_of(TOKENIZER), 0.0
    for before, after in zip(one.states, one.states[1:]):
        with torch.no_grad():
            logits = MODEL.eval()(torch.from_numpy(before)[None]).logits[0].double()
        logits[:, torch.from_numpy(vocabulary.is_special_V)] = -torch.inf
        [place] = np.flatnonzero(before != after)
        total += logits.log_softmax(-1)[place, after[place]].item()
    assert one.log_likelihood == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("options, said", [
    (dict(prompts="the cat"), "prompts"), (dict(prompts=[]), "prompts"),
    (dict(prompts=[3]), "prompts"), (dict(mode="infil"), "did you mean 'infill'"),
    (dict(mode="infill"), "no gap"), (dict(max_new_tokens=0), "max_new_tokens"),
    (dict(max_new_tokens=60), "max_position_embeddings"), (dict(sampler="none"), "sampler='none'"),
    (dict(temprature=1), "did you mean 'temperature'"), (dict(rewrite_share=0), "rewrite_share"),
    (dict(prompts=[""], mode="rewrite"), "no words to rewrite"), (dict(batch_size=0), "batch_size"),
    (dict(block_size=2, num_steps=3, max_new_tokens=12), "num_steps=3"),
])  # fmt: skip
def test_what_cannot_be_written_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        generate(MODEL, TOKENIZER, **{"prompts": ["the cat"], **options})


@pytest.mark.parametrize("kind", ["mask", "cls", "sep", "pad"])
def test_a_tokenizer_without_a_special_token_is_refused(kind, monkeypatch):
    other = train_tokenizer(TEXTS, vocab_size=90)
    setattr(other, f"{kind}_token", None)
    with pytest.raises(ValueError, match=f"no {kind} token"):
        generate(MODEL, other, ["the cat"])
