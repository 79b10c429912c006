"Extending, trimming and transplanting a vocabulary: what must not change, and what must."

import copy
import math

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import (
    TOKENIZER_TRAINERS,
    num_token_ids,
    train_tokenizer,
)
from bertlab.data.vocabularies import (
    extend_tokenizer,
    map_vocabulary,
    _piece_surfaces,
    trim_tokenizer,
)
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import from_huggingface, save_model
from bertlab.model.losses import token_bytes
from bertlab.model.vocabulary import (
    UNUSED_ROW_BIAS,
    extend_vocabulary,
    masked_bits_per_byte,
    _match_token_frequencies,
    transplant_vocabulary,
    trim_vocabulary,
)

TRAIN = embedded_corpus().train_texts
HOME, AWAY = TRAIN[:250], TRAIN[3000:3060]
KINDS = sorted(TOKENIZER_TRAINERS)
TOKENIZERS = {algorithm: train_tokenizer(HOME, 840, kind=algorithm) for algorithm in KINDS}
SHAPE = dict(hidden_size=32, num_attention_heads=2, intermediate_size=48, num_hidden_layers=2,
             max_position_embeddings=64)  # fmt: skip


def make_model(tokenizer, seed=0, preset=modernbert_tiny, **changes):
    torch.manual_seed(seed)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "mask")
    }
    model = BertLabForMaskedLM(
        preset(vocab_size=num_token_ids(tokenizer), **{**SHAPE, **special, **changes})
    )
    for parameter in model.parameters():  # a fresh bias is zero, which would hide a wrong row
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def encode(tokenizer, texts):
    return tokenizer(
        texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt"
    )


@torch.no_grad()
def logits(model, tokenizer, texts):
    batch = encode(tokenizer, texts)
    return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_trimmed_tokenizer_splits_its_texts_as_before(algorithm, tmp_path):
    old = TOKENIZERS[algorithm]
    small, ids = trim_tokenizer(old, AWAY)
    small.save_pretrained(tmp_path)
    want = old(AWAY, verbose=False).input_ids
    for tokenizer in (small, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == len(ids) < len(old)
        assert [[ids[i] for i in row] for row in tokenizer(AWAY, verbose=False).input_ids] == want


@pytest.mark.parametrize("algorithm", KINDS)
def test_new_pieces_are_spelled_like_their_parts(algorithm, tmp_path):
    old = TOKENIZERS[algorithm]
    extended, parts = extend_tokenizer(old, AWAY, 40, min_count=2)
    assert list(parts) == list(range(len(old), len(extended)))
    surfaces = _piece_surfaces(extended)
    spell = lambda id: b" " * (surfaces[id].begins and algorithm != "wordpiece") + surfaces[id].text
    for id, part in parts.items():
        assert len(part) > 1 and max(part) < len(old)
        assert spell(id) == b"".join(map(spell, part))
    before, after = (sum(map(len, t(AWAY, verbose=False).input_ids)) for t in (old, extended))
    assert after < 0.97 * before
    extended.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(AWAY, verbose=False).input_ids == extended(AWAY, verbose=False).input_ids


@pytest.mark.parametrize("word, inside", [("nov", "zanov obnov"), ("दिन", "कदिन मदिन")])
def test_a_piece_within_a_word_is_no_twin_of_the_word(word, inside):
    old = train_tokenizer([f"x {word} y {word}"] * 30, 320, kind="bpe")
    new = train_tokenizer([inside] * 30, 320, kind="bpe")
    mapping, surfaces = map_vocabulary(old, new), _piece_surfaces(old)
    ids = [
        id
        for id, piece in enumerate(_piece_surfaces(new))
        if piece and piece.text == word.encode() and not piece.begins
    ]
    assert ids and not set(ids) & mapping.twins
    assert all(not surfaces[part].begins for part in mapping.parts[ids[0]])


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_trimming_leaves_every_remaining_score_equal_bit_for_bit(tied):
    old = TOKENIZERS["wordpiece"]
    model = make_model(old, tie_word_embeddings=tied)
    small, tokenizer = trim_vocabulary(model, old, AWAY)
    ids = trim_tokenizer(old, AWAY).kept
    got, want = logits(small, tokenizer, AWAY[:20]), logits(model, old, AWAY[:20])
    assert torch.equal(got[..., : len(ids)], want[..., ids])
    assert small.config.vocab_size % 64 == 0 and (got[..., len(ids) :] < UNUSED_ROW_BIAS / 2).all()
    assert small.config.num_params() < model.config.num_params()


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_means_of_their_parts(tied):
    old = TOKENIZERS["wordpiece"]
    model = make_model(old, tie_word_embeddings=tied)
    before = copy.deepcopy(model.state_dict())
    longer, tokenizer = extend_vocabulary(model, old, AWAY, 30, min_count=2)
    parts = extend_tokenizer(old, AWAY, 30, min_count=2).parts
    tables = {"encoder.embeddings.tokens.weight", "head.bias", *["head.decoder"] * (not tied)}
    for name, weight in longer.state_dict().items():
        expected = before[name]
        if name in tables:
            expected = torch.cat(
                [expected, *(expected[part].mean(0, keepdim=True) for part in parts.values())]
            )
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight[: len(before[name])], before[name])
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    assert longer.config.vocab_size == len(tokenizer)
    texts = ["zq zq"]  # no new piece: old scores stay what they were
    got, expected = logits(longer, tokenizer, texts), logits(model, old, texts)
    torch.testing.assert_close(got[..., : len(old)], expected, rtol=0, atol=1e-5)


def test_a_transplant_gives_twins_their_rows():
    old, new = TOKENIZERS["wordpiece"], TOKENIZERS["bpe"]
    model = make_model(old, tie_word_embeddings=False)
    moved, _ = transplant_vocabulary(model, old, new, HOME)
    mapping, before, after = map_vocabulary(old, new), model.state_dict(), moved.state_dict()
    assert len(mapping.twins) > 100
    for name in ("encoder.embeddings.tokens.weight", "head.decoder"):
        for id in mapping.twins:
            assert torch.equal(after[name][id], before[name][mapping.parts[id][0]])
        assert torch.isfinite(after[name]).all()
    assert moved.config.mask_token_id == new.mask_token_id and moved.config.vocab_size == len(new)


def test_a_transplant_matches_the_frequencies_of_texts():
    old, new = TOKENIZERS["wordpiece"], TOKENIZERS["bpe"]
    model = make_model(old)
    with torch.no_grad():
        model.head.bias.normal_(generator=torch.Generator().manual_seed(0))
    plain = transplant_vocabulary(model, old, new).model
    mapping = map_vocabulary(old, new)
    for id in mapping.twins:  # no text, no frequencies
        assert plain.head.bias[id] == model.head.bias[mapping.parts[id][0]]
    moved = transplant_vocabulary(model, old, new, iter(HOME)).model

    def correction(model) -> float:  # of one more round, in nats, of tokens by their frequency
        ids = [id for row in new(HOME, add_special_tokens=False).input_ids for id in row]
        counts = torch.tensor(ids).bincount(minlength=len(new))
        before = model.head.bias.detach().clone()
        _match_token_frequencies(model, new, HOME, rounds=1)
        return float(((model.head.bias.detach() - before).abs() * counts).sum() / counts.sum())

    assert correction(plain) > 1 > 0.05 > correction(moved)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_changed_models_open_in_plain_transformers(family, tmp_path):
    tokenizer = TOKENIZERS["wordpiece" if family == "bert" else "bpe"]
    shape = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                 intermediate_size=48, max_position_embeddings=66, bos_token_id=2, eos_token_id=3)  # fmt: skip
    torch.manual_seed(0)
    bert, roberta = BertConfig(**shape), RobertaConfig(**shape, pad_token_id=1, type_vocab_size=1)
    model = BertForMaskedLM(bert) if family == "bert" else RobertaForMaskedLM(roberta)
    model = from_huggingface(model)
    for name, (changed, words) in {
        "longer": extend_vocabulary(model, tokenizer, AWAY, 20, min_count=2),
        "shorter": trim_vocabulary(model, tokenizer, AWAY),
        "moved": transplant_vocabulary(model, tokenizer, TOKENIZERS["unigram"], texts=AWAY),
    }.items():
        save_model(changed, words, tmp_path / name)
        opened = AutoModelForMaskedLM.from_pretrained(tmp_path / name).eval()
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert "BertLab" not in type(opened).__name__
        batch = again(AWAY[:8], padding=True, truncation=True, max_length=60, return_tensors="pt")
        with torch.no_grad():
            want = changed(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            got = opened(**batch).logits
        real = batch.attention_mask.bool()
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-5)


LARGER = train_tokenizer(HOME, 900)


@pytest.mark.parametrize("change, words", [
    (lambda m, t: extend_vocabulary(m, LARGER, AWAY, 5), ["899", "vocab_size is 840"]),
    (lambda m, t: transplant_vocabulary(m, LARGER, t), ["899", "vocab_size is 840"]),
    (lambda m, t: extend_vocabulary(m, t, AWAY, 0), ["num_pieces", "0"]),
    (lambda m, t: extend_vocabulary(m, t, ["a b"], 5), ["min_count"]),
    (lambda m, t: trim_vocabulary(m, t, AWAY, multiple_of=0), ["multiple_of", "0"]),
    (lambda m, t: trim_vocabulary(m, t, AWAY, keep=["☃☃"]), ["keep", "☃☃"]),
])  # fmt: skip
def test_wrong_arguments_are_named(change, words):
    tokenizer = TOKENIZERS["wordpiece"]
    with pytest.raises(ValueError) as caught:
        change(make_model(tokenizer), tokenizer)
    assert all(word in str(caught.value) for word in words)


def test_bits_per_byte_of_a_uniform_model():
    tokenizer = TOKENIZERS["wordpiece"]
    model = make_model(tokenizer)
    for parameter in model.parameters():
        parameter.data.zero_()
    bits = masked_bits_per_byte(model, tokenizer, AWAY, 64, mlm_probability=0.999)
    rows = tokenizer(AWAY, add_special_tokens=False, verbose=False).input_ids
    ids = [id for row in rows for id in row]
    num_bytes = float(token_bytes(tokenizer, len(tokenizer))[ids].sum())
    assert bits == pytest.approx(len(ids) * math.log2(len(tokenizer)) / num_bytes, rel=0.02)


@pytest.mark.parametrize("length, longest", [(64, 64), (10**30, 64), (32, 32)])
def test_a_transplanted_model_reads_as_far_as_it_did(length, longest):
    model, old = make_model(TOKENIZERS["wordpiece"]), copy.deepcopy(TOKENIZERS["wordpiece"])
    old.model_max_length = length
    moved = transplant_vocabulary(model, old, TOKENIZERS["bpe"])
    assert moved.tokenizer.model_max_length == longest
