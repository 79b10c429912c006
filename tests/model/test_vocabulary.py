"Extending, trimming and transplanting a vocabulary: what must not change, and what must."

import copy
import json

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
    piece_surfaces,
    trim_tokenizer,
)
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import from_huggingface, save_model
from bertlab.model.vocabulary import (
    UNUSED_ROW_BIAS,
    extend_vocabulary,
    masked_bits_per_byte,
    match_token_frequencies,
    transplant_vocabulary,
    trim_vocabulary,
)

TRAIN = embedded_corpus().train_texts
HOME, AWAY = TRAIN[:250], TRAIN[3000:3060]
KINDS = sorted(TOKENIZER_TRAINERS)
TOKENIZERS = {kind: train_tokenizer(HOME, 840, kind=kind) for kind in KINDS}
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_trimmed_tokenizer_cuts_kept_text_as_before(kind, tmp_path):
    old = TOKENIZERS[kind]
    small, kept = trim_tokenizer(old, AWAY)
    small.save_pretrained(tmp_path)
    for one in (small, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(one) == len(kept) < len(old)
        assert [[kept[id] for id in row] for row in one(AWAY, verbose=False).input_ids] == old(
            AWAY, verbose=False
        ).input_ids
        assert one.convert_ids_to_tokens(list(range(len(kept)))) == old.convert_ids_to_tokens(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_tokenizer_knows_of_what_its_pieces_are_made(kind, tmp_path):
    old = TOKENIZERS[kind]
    more, parts = extend_tokenizer(old, AWAY, 40, min_count=2)
    assert len(more) == len(old) + len(parts) and list(parts) == list(range(len(old), len(more)))
    spelled = piece_surfaces(more)
    for id, part in parts.items():
        assert len(part) > 1 and max(part) < len(old)
        written = [
            b" " * (one.begins and kind != "wordpiece") + one.text
            for one in (spelled[p] for p in [id, *part])
        ]
        assert written[0] == b"".join(written[1:])
    before, after = (sum(map(len, one(AWAY, verbose=False).input_ids)) for one in (old, more))
    assert after < 0.97 * before
    more.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(AWAY, verbose=False).input_ids == more(AWAY, verbose=False).input_ids
    assert extend_tokenizer(old, AWAY, 40, min_count=2).tokenizer.get_vocab() == more.get_vocab()


def test_counterparts_find_the_same_piece_in_another_spelling():
    old = train_tokenizer(["the inner thing, the singing thing"] * 3, 60)
    new = train_tokenizer(["the inner thing, the singing thing The"] * 3, 300, kind="bpe")
    result = map_vocabulary(old, new)
    token = lambda tokenizer, piece: tokenizer.convert_tokens_to_ids(piece)
    assert result.parts[token(new, "Ġthe")] == [token(old, "the")]
    assert result.parts[token(new, ",")] == [token(old, ",")]
    for role in ("pad", "cls", "sep", "mask", "unk"):
        assert result.parts[getattr(new, f"{role}_token_id")] == [getattr(old, f"{role}_token_id")]
    inside = [id for id, part in enumerate(result.parts) if len(part) > 1]
    names = piece_surfaces(old)
    for id in inside:
        spelled = piece_surfaces(new)[id]
        assert (
            b"".join(names[part].text for part in result.parts[id]) == spelled.text.lower().strip()
        )


@pytest.mark.parametrize(
    "word, inside", [("nov", "zanov obnov"), ("нов", "занов обнов"), ("दिन", "कदिन मदिन")]
)
def test_a_piece_within_a_word_is_no_twin_of_the_word(word, inside):
    old = train_tokenizer([f"x {word} y {word}"] * 30, 320, kind="bpe")
    new = train_tokenizer([inside] * 30, 320, kind="bpe")
    result, names = map_vocabulary(old, new), piece_surfaces(old)
    ids = [
        id
        for id, piece in enumerate(piece_surfaces(new))
        if piece and piece.text == word.encode() and not piece.begins
    ]
    assert ids and not set(ids) & result.twins
    assert all(not names[part].begins for part in result.parts[ids[0]])


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_trimming_leaves_every_kept_score_equal_bit_for_bit(kind, tied):
    old = TOKENIZERS[kind]
    model = make_model(old, tie_word_embeddings=tied)
    assert model.config.vocab_size % 8 == 0
    small, tokenizer = trim_vocabulary(model, old, AWAY)
    kept = trim_tokenizer(old, AWAY).kept
    for texts in (AWAY[:1], AWAY[:20]):
        got, expected = logits(small, tokenizer, texts), logits(model, old, texts)
        assert torch.equal(got[..., : len(kept)], expected[..., kept])
    assert small.config.vocab_size % 64 == 0 and (got[..., len(kept) :] < UNUSED_ROW_BIAS / 2).all()
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
    result = map_vocabulary(old, new)
    assert len(result.twins) > 100
    for name in ("encoder.embeddings.tokens.weight", "head.decoder"):
        for id in result.twins:
            assert torch.equal(
                moved.state_dict()[name][id], model.state_dict()[name][result.parts[id][0]]
            )
        assert torch.isfinite(moved.state_dict()[name]).all()
    assert moved.config.mask_token_id == new.mask_token_id and moved.config.vocab_size == len(new)


def test_a_transplant_matches_the_frequencies_of_texts():
    old, new = TOKENIZERS["wordpiece"], TOKENIZERS["bpe"]
    model = make_model(old)
    with torch.no_grad():
        model.head.bias.normal_(generator=torch.Generator().manual_seed(0))
    plain = transplant_vocabulary(model, old, new).model
    result = map_vocabulary(old, new)
    assert all(
        plain.head.bias[id] == model.head.bias[result.parts[id][0]] for id in result.twins
    ), "no text, no frequencies"
    moved = transplant_vocabulary(model, old, new, iter(HOME)).model

    def correction(one) -> float:  # of one more round, in nats, of entries by their frequency
        counts = torch.zeros(len(new))
        for ids in new(HOME, add_special_tokens=False).input_ids:
            counts += torch.bincount(torch.tensor(ids), minlength=len(new))
        before = one.head.bias.detach().clone()
        match_token_frequencies(one, new, HOME, rounds=1)
        return float(((one.head.bias.detach() - before).abs() * counts).sum() / counts.sum())

    assert correction(plain) > 1 > 0.05 > correction(moved)
    headless = BertLabModel(moved.config).eval()
    before = {name: weight.clone() for name, weight in headless.state_dict().items()}
    match_token_frequencies(headless, new, HOME)
    assert all(torch.equal(weight, before[name]) for name, weight in headless.state_dict().items())


@pytest.mark.parametrize("theirs", ["bert", "roberta"])
def test_changed_models_open_in_plain_transformers(theirs, tmp_path):
    tokenizer = TOKENIZERS["wordpiece" if theirs == "bert" else "bpe"]
    shape = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                 intermediate_size=48, max_position_embeddings=66, bos_token_id=2, eos_token_id=3)  # fmt: skip
    torch.manual_seed(0)
    plain = (
        BertForMaskedLM(BertConfig(**shape))
        if theirs == "bert"
        else RobertaForMaskedLM(RobertaConfig(**shape, pad_token_id=1, type_vocab_size=1))
    )
    model = from_huggingface(plain)
    for name, change in {
        "longer": lambda: extend_vocabulary(model, tokenizer, AWAY, 20, min_count=2),
        "shorter": lambda: trim_vocabulary(model, tokenizer, AWAY),
        "moved": lambda: transplant_vocabulary(model, tokenizer, TOKENIZERS["unigram"], texts=AWAY),
    }.items():
        changed, new = change()
        save_model(changed, new, tmp_path / name)
        opened = AutoModelForMaskedLM.from_pretrained(tmp_path / name).eval()
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert (
            "BertLab"
            not in json.loads((tmp_path / name / "config.json").read_text())["architectures"][0]
        )
        batch = again(AWAY[:8], padding=True, truncation=True, max_length=60, return_tensors="pt")
        with torch.no_grad():
            expected = changed(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask
            ).logits
            got = opened(**batch).logits
        real = batch.attention_mask.bool()
        torch.testing.assert_close(got[real], expected[real], rtol=0, atol=1e-5)


def test_a_model_of_another_size_is_refused():
    model = make_model(TOKENIZERS["bpe"])
    larger = train_tokenizer(HOME, 900, kind="bpe")
    for work in (
        lambda: extend_vocabulary(model, larger, AWAY, 5),
        lambda: trim_vocabulary(model, larger, AWAY),
        lambda: transplant_vocabulary(model, larger, TOKENIZERS["bpe"]),
    ):
        with pytest.raises(ValueError, match="899 .* vocab_size is 840"):
            work()


@pytest.mark.parametrize("work, words", [
    (lambda m, t: extend_vocabulary(m, t, AWAY, 0), ["num_pieces", "0"]),
    (lambda m, t: extend_vocabulary(m, t, ["a b"], 5), ["min_count"]),
    (lambda m, t: trim_vocabulary(m, t, AWAY, multiple_of=0), ["multiple_of", "0"]),
    (lambda m, t: trim_vocabulary(m, t, AWAY, keep=["☃☃"]), ["keep", "☃☃"]),
])  # fmt: skip
def test_a_mistake_names_argument_value_and_fix(work, words):
    tokenizer = TOKENIZERS["wordpiece"]
    with pytest.raises(ValueError) as caught:
        work(make_model(tokenizer), tokenizer)
    assert all(word in str(caught.value) for word in words)


def test_bits_per_byte_of_an_ignorant_model():
    tokenizer = TOKENIZERS["wordpiece"]
    model = make_model(tokenizer)
    for parameter in model.parameters():
        parameter.data.zero_()
    got = masked_bits_per_byte(model, tokenizer, AWAY, 64, mlm_probability=0.999)
    ids = [
        id
        for row in tokenizer(AWAY, add_special_tokens=False, verbose=False).input_ids
        for id in row
    ]
    from bertlab.model.losses import token_bytes

    num_bytes = float(token_bytes(tokenizer, len(tokenizer))[ids].sum())
    expected = len(ids) * torch.log2(torch.tensor(float(len(tokenizer)))).item() / num_bytes
    assert got == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("preset", [bert_tiny, modernbert_tiny])
def test_a_short_model_is_scored_in_short_rows(preset):
    model = make_model(TOKENIZERS["wordpiece"], preset=preset)  # of 64 positions
    short, long = (
        masked_bits_per_byte(model, TOKENIZERS["wordpiece"], AWAY, length) for length in (64, 128)
    )
    assert short == long


def test_a_transplanted_model_reads_as_far_as_it_did():
    model, old = make_model(TOKENIZERS["wordpiece"]), copy.deepcopy(TOKENIZERS["wordpiece"])
    new = copy.deepcopy(TOKENIZERS["bpe"])
    for before, theirs, after in ((64, 8192, 64), (64, 16, 64), (10**30, 8192, 64), (32, 8192, 32)):
        old.model_max_length, new.model_max_length = before, theirs
        moved = transplant_vocabulary(model, old, new)
        assert moved.tokenizer.model_max_length == after and new.model_max_length == theirs
    assert len(moved.tokenizer(" ".join(HOME), truncation=True).input_ids) == 32
