"Three families of tokenizers, trained the same each time, on any source, and what they leave on disk."

import json
import random
import unicodedata
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from bertlab.data import tokenizers as module
from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import (
    SPECIAL_TOKENS,
    TOKENIZER_TRAINERS,
    iter_texts,
    load_tokenizer,
    normalization_note,
    save_tokenizer,
    tokenize_plain,
    train_tokenizer,
)

TEXTS = embedded_corpus().train_texts[:400]
KINDS = sorted(TOKENIZER_TRAINERS)
FOREIGN = "Ωμέγα שָׁלוֹם مَرْحَبًا 今日は सुप्रभात 👩‍💻 \t x"


@pytest.mark.parametrize("algorithm", KINDS)
def test_equal_texts_give_equal_pieces_and_ids(algorithm):
    vocabularies = [train_tokenizer(TEXTS, 900, kind=algorithm).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_saved_tokenizer_loads_in_transformers(algorithm, tmp_path):
    tokenizer = train_tokenizer(TEXTS, 900, kind=algorithm, model_max_length=96)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS[:50], FOREIGN, "", "the [MASK] sat"]
    assert again(texts, verbose=False).input_ids == tokenizer(texts, verbose=False).input_ids
    assert again.model_max_length == 96 and again.padding_side == "right"
    assert [getattr(again, name) for name in SPECIAL_TOKENS] == [*SPECIAL_TOKENS.values()]
    assert again.convert_tokens_to_ids([*SPECIAL_TOKENS.values()]) == [0, 1, 2, 3, 4]
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    pair = again("one", "two").input_ids
    assert pair.count(again.sep_token_id) == 2 and pair[0] == again.cls_token_id


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_the_mask_takes_the_space_on_its_left_as_a_word_does(algorithm, tmp_path):
    train_tokenizer(TEXTS, 900, kind=algorithm).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with_word, with_mask = (
        tokenizer(f"return {word} value").input_ids for word in ("the", "[MASK]")
    )
    (local,) = tokenizer(" the", add_special_tokens=False).input_ids
    assert local in with_word
    assert [id if id != local else tokenizer.mask_token_id for id in with_word] == with_mask


def test_byte_level_bpe_gives_every_text_back():
    tokenizer = train_tokenizer(TEXTS, 500, kind="bpe")
    for text in (FOREIGN, "  two  spaces\n\n", "\x00\x07", "".join(map(chr, range(300, 1000, 7)))):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert tokenizer.unk_token_id not in ids


def probabilities(tokenizer):
    scored = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    return {piece: score for piece, score in scored if piece not in SPECIAL_TOKENS.values()}


def test_unigram_takes_the_most_probable_segmentation():
    tokenizer = train_tokenizer(TEXTS, 600, kind="unigram")
    scores = probabilities(tokenizer)

    def best(word):  # every cut, one by one
        if not word:
            return 0.0
        return max(
            (
                scores[word[:i]] + best(word[i:])
                for i in range(1, len(word) + 1)
                if word[:i] in scores
            ),
            default=-1e9,
        )

    words = {w for text in TEXTS for w in text.split() if w.isalpha() and len(w) <= 9}
    for word in sorted(words)[:200]:
        pieces = tokenizer.tokenize(word)
        assert sum(scores[p] for p in pieces) == pytest.approx(best("▁" + word), abs=1e-5)


def test_files_datasets_rows_and_generators_are_texts(tmp_path):
    texts = ["the cat sat", "the rat ran", "a mat"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("the cat sat\nthe rat ran\n")
    (tmp_path / "folder" / "b.txt").write_text("a mat\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"body": t}) for t in texts))
    assert iter_texts(tmp_path / "folder") == texts
    assert iter_texts([tmp_path / "rows.jsonl"], "body") == texts
    assert iter_texts(Dataset.from_dict({"body": texts}), "body") == texts
    assert iter_texts(Dataset.from_dict({"text": texts}).to_iterable_dataset()) == texts
    assert iter_texts(text for text in texts) == texts
    assert iter_texts(embedded_corpus()) == embedded_corpus().train_texts


@pytest.mark.parametrize("arguments, words", [
    ({"texts": "one string"}, ["texts", "list"]),
    ({"texts": [" ", ""]}, ["texts", "no text"]),
    ({"texts": [{"body": "x"}]}, ["text_column='text'", "'body'"]),
    ({"texts": [3]}, ["int", "text_column"]),
    ({"texts": {"train": ["x"]}}, ["texts", "dict"]),
    ({"texts": ["x"], "kind": "wordpeice"}, ["kind='wordpeice'", "wordpiece"]),
    ({"texts": ["x"], "kind": "bpe", "vocab_size": 260}, ["vocab_size=260", "261"]),
    ({"texts": ["abc"], "kind": "unigram", "vocab_size": 8}, ["vocab_size=8", "9"]),
    ({"texts": ["abc"], "kind": "unigram", "limit_alphabet": 0}, ["limit_alphabet", "0"]),
    ({"texts": ["abc"], "kind": "bpe", "strip_accents": False}, ["strip_accents=False", "kind: bpe", "leave"]),
    ({"texts": ["abc"], "lowercase": False, "strip_accents": True}, ["strip_accents=True", "lowercase: False"]),
    ({"texts": ["abc"], "model_max_length": 0}, ["model_max_length=0", "3"]),
    ({"texts": ["abc"], "kind": "bpe", "model_max_length": 2}, ["model_max_length=2", "3"]),
])  # fmt: skip
def test_a_wrong_argument_is_named(arguments, words):
    with pytest.raises(ValueError) as caught:
        train_tokenizer(**arguments)
    assert all(word in str(caught.value) for word in words)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="nowhere.txt"):
        train_tokenizer(Path("nowhere.txt"))


@pytest.mark.parametrize("algorithm", KINDS)
def test_marks_of_letters_never_stand_in_a_word_of_their_own(algorithm):
    tokenizer = train_tokenizer([FOREIGN] * 5, 400, kind=algorithm, lowercase=False)
    encoded = tokenizer(FOREIGN, add_special_tokens=False, return_offsets_mapping=True)
    words = encoded.word_ids()
    assert "Mn" in {unicodedata.category(sign) for sign in FOREIGN}
    starts = {
        words[i]: start for i, (start, _) in reversed(list(enumerate(encoded.offset_mapping)))
    }
    assert not any(
        unicodedata.category(FOREIGN[start]).startswith("M") for start in starts.values()
    )


def without_spaces(script):
    "A text that writes no spaces: DNA, or letters and marks as Thai has them."
    lots = random.Random(0)
    if script == "dna":
        return ["".join(lots.choices("acgt", k=900)) for _ in range(20)]
    letters, marks = [chr(code) for code in range(0xE01, 0xE2F)], "\u0e34\u0e35\u0e48"
    return [
        "".join(lots.choice(letters) + lots.choice(["", "", *marks]) for _ in range(500))
        for _ in range(20)
    ]


@pytest.mark.parametrize("script", ["dna", "thai"])
def test_wordpiece_warns_of_text_without_spaces(script):
    with pytest.warns(UserWarning, match="kind: bpe"):
        train_tokenizer(without_spaces(script), 700)


@pytest.mark.parametrize("run", ["acgt", "१२3", "-", " ", "\n "])
def test_no_run_makes_a_long_word_of_byte_level_bpe(run):
    tokenizer = train_tokenizer([run * 1000 + "x"], 300, kind="bpe").backend_tokenizer
    words = tokenizer.pre_tokenizer.pre_tokenize_str(run * 1000 + "x")
    assert max(stop - start for _, (start, stop) in words) <= 33


def test_unigram_takes_a_part_of_much_text_and_all_letters(monkeypatch):
    draw, sizes, train = random.Random(0), [], module._train

    def watched(untrained, texts, trainer):
        sizes.append(sum(map(len, texts)))
        return train(untrained, texts, trainer)

    monkeypatch.setattr(module, "_train", watched)
    monkeypatch.setattr(module, "_MANY_LETTERS", 2000)
    words = ["the cat sleeps on the mat"] * 400  # much text of few different words
    train_tokenizer(words, 50, kind="unigram")
    runs = ["".join(draw.choices("ACGT", k=500)) for _ in range(100)]
    letters = {*train_tokenizer([*runs, "N"], 50, kind="unigram").get_vocab()}
    assert sizes[0] == 400 * len(words[0]) and sizes[1] <= 2500 and letters >= {*"ACGTN"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("algorithm", KINDS)
def test_what_truncation_drops_is_not_tokenized(algorithm, side):
    tokenizer = train_tokenizer(TEXTS, 600, kind=algorithm)
    tokenizer.truncation_side = side
    text = " ".join(TEXTS * (1 + 300_000 // sum(map(len, TEXTS))))
    short, full = module.cut_long_texts(tokenizer, [text, "a"], 100)
    assert len(short) == 2**17 and full == "a"
    cut, expected = (tokenizer(t, truncation=True, max_length=100) for t in (short, text))
    assert cut.input_ids == expected.input_ids and len(cut.input_ids) == 100


def test_a_frame_of_other_tokens_is_refused(tmp_path):
    save_tokenizer(train_tokenizer(TEXTS[:50], 300, kind="bpe"), tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [99]
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="frames texts with"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_special_token_in_a_text_is_text(algorithm):
    tokenizer = train_tokenizer(TEXTS, 900, kind=algorithm)
    special = {tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    texts = ["Write [MASK] here.", "[CLS]"]
    rows = tokenize_plain(tokenizer, texts)["input_ids"]
    assert not {i for row in rows for i in row[1:-1]} & special
    assert all(row[0] == tokenizer.cls_token_id for row in rows)
    assert tokenize_plain(tokenizer, texts[0])["input_ids"] == rows[0]


def test_a_general_tokenizer_is_saved_for_transformers_4(tmp_path):
    save_tokenizer(train_tokenizer(TEXTS, 900, kind="bpe"), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert load_tokenizer(tmp_path)("a text").input_ids


@pytest.mark.parametrize("algorithm", ["wordpiece", "unigram"])
def test_as_many_characters_are_kept_as_the_text_needs(algorithm):
    generator, total = random.Random(0), 2500
    texts = [
        "".join(chr(0x4E00 + generator.randrange(total)) for _ in range(200)) for _ in range(200)
    ]

    def characters(tokenizer):
        return sum(piece >= "\u4e00" and len(piece) == 1 for piece in tokenizer.get_vocab())

    tokenizer = train_tokenizer(texts, 6000, kind=algorithm)
    ids = sum(tokenizer(texts, verbose=False).input_ids, [])
    assert characters(tokenizer) > 2400 and ids.count(tokenizer.unk_token_id) < 0.001 * len(ids)
    with pytest.warns(UserWarning, match="become .UNK."):
        limited = train_tokenizer(texts, 6000, kind=algorithm, limit_alphabet=1200)
    assert characters(limited) in (1200, 1199)


APART = {  # texts, and pairs of words that differ in a sign alone
    "hindi": (["मैं घर में हूँ और मेरे भाई भी घर में हैं", "दिन को दीन कहना ठीक नहीं है"], ("में", "मैं")),
    "vietnamese": (
        ["ma má mà mả mã mạ là sáu từ khác nhau", "tôi muốn mua một con bò"],
        ("ma", "mạ"),
    ),
    "japanese": (["がっこうへいきます。かきとかぎ", "バスとパスもちがいます"], ("かき", "かぎ")),
    "korean": (["나는 학교에 갑니다 그리고 집에 옵니다"], ("나는", "나")),
}


@pytest.mark.parametrize("language", sorted(APART))
def test_accents_stay_where_a_text_has_many_of_them(language, tmp_path, recwarn):
    texts, (item, another) = APART[language]
    with pytest.warns(UserWarning, match="% of the letters .* strip_accents: true"):
        tokenizer = train_tokenizer(texts * 9, 400)
    tokenizer.save_pretrained(tmp_path)
    recwarn.clear()
    for again in (
        tokenizer,
        AutoTokenizer.from_pretrained(tmp_path),
        train_tokenizer(texts * 9, 400, strip_accents=False),
    ):
        assert (
            again(item).input_ids != again(another).input_ids
            and again(texts).input_ids == tokenizer(texts).input_ids
        )
        assert not any(again.unk_token_id in ids for ids in again(texts).input_ids)
        assert again.tokenize("ABC") == again.tokenize("abc")
    stripped = train_tokenizer(texts * 9, 400, strip_accents=True)
    assert (
        stripped.decode(stripped(texts[0]).input_ids, skip_special_tokens=True) != texts[0].lower()
    )
    assert not recwarn


def test_a_note_says_that_normalization_changes_bytes():
    korean, hindi = APART["korean"][0] * 9, APART["hindi"][0] * 9
    for texts, share in (
        (korean, "2.31"),
        (hindi, "0.73"),
    ):  # two jamo or three for a syllable; signs
        stripped = train_tokenizer(texts, 400, strip_accents=True)
        assert share in normalization_note(
            texts, stripped
        ) and "bits per byte" in normalization_note(texts, stripped)
        assert normalization_note(texts, train_tokenizer(texts, 400, lowercase=False)) == ""
    for algorithm in KINDS:
        assert normalization_note(TEXTS, train_tokenizer(TEXTS, 900, kind=algorithm)) == ""
    assert "0.33" in normalization_note(
        ["ＡＢＣ１２３"], train_tokenizer(TEXTS, 900, kind="unigram")
    )
