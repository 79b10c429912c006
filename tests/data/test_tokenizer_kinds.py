"Three families of tokenizers, trained the same each time, on any source, and what they leave on disk."

import json
import random
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from bertlab.data.corpus import embedded_corpus
from bertlab.data.supervised import fit_offsets
from bertlab.data.tokenizers import (
    SPECIAL_TOKENS,
    TOKENIZER_TRAINERS,
    CutLattice,
    count_characters_to_keep,
    iter_texts,
    load_tokenizer,
    normalization_note,
    train_tokenizer,
)

TEXTS = embedded_corpus().train_texts[:400]
KINDS = sorted(TOKENIZER_TRAINERS)
FOREIGN = "Ωμέγα שָׁלוֹם مَرْحَبًا 今日は सुप्रभात 👩‍💻 \t x"


@pytest.mark.parametrize("kind", KINDS)
def test_equal_texts_give_an_equal_tokenizer_whatever_their_order_of_hashing(kind):
    states = {train_tokenizer(TEXTS, 900, kind=kind).backend_tokenizer.to_str() for _ in range(3)}
    assert len(states) == 1


def test_unigram_does_not_depend_on_the_order_of_the_texts():
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    one, other = (train_tokenizer(texts, 700, kind="unigram") for texts in (TEXTS, shuffled))
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_in_plain_transformers_and_reads_the_same(kind, tmp_path):
    tokenizer = train_tokenizer(TEXTS, 900, kind=kind, model_max_length=96)
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


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_mask_takes_the_space_on_its_left_as_a_word_does(kind, tmp_path):
    train_tokenizer(TEXTS, 900, kind=kind).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with_word, with_mask = (
        tokenizer(f"return {word} value").input_ids for word in ("self", "[MASK]")
    )
    (own,) = tokenizer(" self", add_special_tokens=False).input_ids
    assert own in with_word
    assert [id if id != own else tokenizer.mask_token_id for id in with_word] == with_mask


def test_byte_level_bpe_gives_every_text_back():
    tokenizer = train_tokenizer(TEXTS, 500, kind="bpe")
    for text in (FOREIGN, "  two  spaces\n\n", "\x00\x07", "".join(map(chr, range(300, 1000, 7)))):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert tokenizer.unk_token_id not in ids


def probabilities(tokenizer):
    scored = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    return {piece: score for piece, score in scored if piece not in SPECIAL_TOKENS.values()}


def test_unigram_takes_the_most_probable_of_all_cuts():
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


def test_expected_counts_are_the_mean_over_all_cuts_by_enumeration():
    pieces = {p: i for i, p in enumerate(["a", "b", "c", "ab", "bc", "abc", "ca"])}
    p_V = np.array([0.2, 0.1, 0.15, 0.2, 0.1, 0.05, 0.2])
    words, counts = ["abc", "abcab", "a"], np.array([3.0, 2.0, 5.0])
    wanted = Counter()
    for word, number in zip(words, counts):
        cuts = [[]]
        found = []
        while cuts:
            cut = cuts.pop()
            done = len("".join(cut))
            if done == len(word):
                found.append((np.prod([p_V[pieces[x]] for x in cut]), cut))
            else:
                cuts += [[*cut, x] for x in pieces if word.startswith(x, done)]
        total = sum(weight for weight, _ in found)
        for weight, cut in found:
            for piece in cut:
                wanted[piece] += number * weight / total
    got = CutLattice(words, pieces).expect(p_V, counts)
    np.testing.assert_allclose(got, [wanted[p] for p in pieces], rtol=1e-12)


def test_unigram_fits_text_better_than_characters_and_sums_to_one():
    tokenizer = train_tokenizer(TEXTS, 900, kind="unigram")
    assert sum(np.exp(list(probabilities(tokenizer).values()))) == pytest.approx(1, abs=1e-3)
    small, large = (
        len(train_tokenizer(TEXTS, size, kind="unigram").tokenize(TEXTS[0])) for size in (300, 900)
    )
    assert large < small


@pytest.mark.slow
def test_unigram_cuts_held_out_text_as_shortly_as_the_librarys_trainer():
    from tokenizers import Tokenizer, models, trainers

    ours = train_tokenizer(TEXTS, 900, kind="unigram")
    theirs = Tokenizer(models.Unigram())
    theirs.normalizer = ours.backend_tokenizer.normalizer
    theirs.pre_tokenizer = ours.backend_tokenizer.pre_tokenizer
    theirs.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=900,
            special_tokens=[*SPECIAL_TOKENS.values()],
            unk_token="[UNK]",
            show_progress=False,
        ),
    )
    held_out = embedded_corpus().validation_texts[:100]
    lengths = [
        sum(len(one.encode(text, add_special_tokens=False).ids) for text in held_out)
        for one in (ours.backend_tokenizer, theirs)
    ]
    assert lengths[0] < 1.03 * lengths[1]


def test_files_directories_datasets_rows_and_generators_are_read_alike(tmp_path):
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
    ({"texts": ["x"], "kind": "wordpeice"}, ["kind='wordpeice'", "wordpiece"]),
    ({"texts": ["x"], "kind": "bpe", "vocab_size": 260}, ["vocab_size=260", "261"]),
    ({"texts": ["abc"], "kind": "unigram", "vocab_size": 8}, ["vocab_size=8", "9"]),
    ({"texts": ["abc"], "kind": "unigram", "limit_alphabet": 0}, ["limit_alphabet", "0"]),
    ({"texts": ["abc"], "kind": "bpe", "strip_accents": False}, ["strip_accents=False", "kind: bpe", "leave"]),
    ({"texts": ["abc"], "lowercase": False, "strip_accents": True}, ["strip_accents=True", "lowercase: False"]),
    ({"texts": ["abc"], "model_max_length": 0}, ["model_max_length", "3 or more", "got 0"]),
    ({"texts": ["abc"], "kind": "bpe", "model_max_length": 2}, ["model_max_length", "3 or more", "got 2"]),
])  # fmt: skip
def test_a_mistake_is_a_value_error_that_names_argument_value_and_fix(arguments, words):
    with pytest.raises(ValueError) as caught:
        train_tokenizer(**arguments)
    assert all(word in str(caught.value) for word in words)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="nowhere.txt"):
        train_tokenizer(Path("nowhere.txt"))


@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_letters_never_stand_in_a_word_of_their_own(kind):
    tokenizer = train_tokenizer([FOREIGN] * 5, 400, kind=kind, lowercase=False)
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


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("script", ["dna", "thai"])
def test_a_script_without_spaces_is_no_unknown_word(script, lowercase, tmp_path):
    texts = without_spaces(script)
    tokenizer = train_tokenizer(texts, 700, lowercase=lowercase)
    tokenizer.save_pretrained(tmp_path)
    for again in (tokenizer, load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        ids = again(texts, add_special_tokens=False, verbose=False).input_ids
        assert ids == tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        assert not any(again.unk_token_id in some for some in ids)
    cuts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(texts[0])
    assert all(
        unicodedata.category(word[0]) != "Mn" and len(word) <= 100 for word, _ in cuts
    )  # marks stay with letters


def test_text_with_spaces_keeps_the_tokenizer_that_it_had():
    tokenizer = train_tokenizer([*TEXTS, "a hash " + "0f" * 80], 900)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    assert (
        state["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and type(tokenizer).__name__ == "BertTokenizer"
    )


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_script_of_many_characters_keeps_as_many_as_its_text_needs_and_there_is_room_for(kind):
    lots, whole = random.Random(0), 2500
    texts = ["".join(chr(0x4E00 + lots.randrange(whole)) for _ in range(200)) for _ in range(200)]
    singles = lambda tokenizer: sum(
        piece.removeprefix("##") >= "\u4e00" and len(piece) == 1 for piece in tokenizer.get_vocab()
    )  # noqa: E731
    tokenizer = train_tokenizer(texts, 3000, kind=kind)
    ids = sum(tokenizer(texts, verbose=False).input_ids, [])
    assert singles(tokenizer) > 2400 and ids.count(tokenizer.unk_token_id) < 0.001 * len(ids)
    with pytest.warns(UserWarning, match="% of the letters .* kind: bpe"):
        tight = train_tokenizer(texts, 2000, kind=kind)
    assert 1900 < singles(tight) <= len(tight) <= 2000
    with pytest.warns(UserWarning, match="become .UNK."):
        limited = train_tokenizer(texts, 3000, kind=kind, limit_alphabet=1200)
    assert singles(limited) == 1200 - (kind == "unigram")  # of which the sign for a space is one


def test_more_than_the_usual_characters_are_kept_only_where_they_are_much_of_the_text():
    rare, common = [10_000] * 1000 + [1] * 3000, [10] * 4000
    assert (
        count_characters_to_keep(rare, [1] * 4000, room=4000) == 1000
    )  # they reach 0.9997 of the text
    assert count_characters_to_keep(common, [1] * 4000, room=9000) == 3998  # 0.9995 of it
    assert count_characters_to_keep(common, [2] * 4000, room=5001) == 2500
    assert (
        count_characters_to_keep(common, [2] * 4000, room=100) == 1000
    )  # as ever: the caller says what it needs
    assert count_characters_to_keep([5] * 80, [2] * 80, room=0) == 80
    words = [20] * 500 + [10] * 500 + [5] * 9000
    assert (
        count_characters_to_keep(common, [1] * 4000, room=3000, words=words) == 2500
    )  # behind words more frequent
    assert count_characters_to_keep(common, [1] * 4000, room=9000, words=words) == 3998
    assert count_characters_to_keep(common, [1] * 4000, room=400, words=words) == 1000


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_rare_characters_leave_frequent_words_their_room(kind):
    lots = random.Random(0)
    words = ["".join(lots.choices("abcdefghij", k=8)) for _ in range(300)]
    chinese = ["".join(chr(0x4E00 + lots.randrange(3000)) for _ in range(200)) for _ in range(50)]
    texts = [
        " ".join(lots.choices(words, k=100)) for _ in range(300)
    ] + chinese  # each word 100 times, a character thrice
    tokenizer = train_tokenizer(texts, 2200, kind=kind)
    assert len(
        tokenizer(" ".join(words), add_special_tokens=False, verbose=False).input_ids
    ) < 5 * len(words)  # not 8
    assert (
        1000
        <= sum(piece[-1] >= "\u4e00" for piece in tokenizer.get_vocab() if len(piece) == 1)
        < 1950
    )


def test_byte_level_text_is_never_unknown_and_warns_nobody(recwarn):
    train_tokenizer(without_spaces("thai"), 400, kind="bpe")
    assert not [one for one in recwarn if "UNK" in str(one.message)]


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
def test_a_vowel_a_tone_and_a_syllable_stay_where_a_text_has_many_of_them(
    language, tmp_path, recwarn
):
    texts, (one, other) = APART[language]
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
            again(one).input_ids != again(other).input_ids
            and again(texts).input_ids == tokenizer(texts).input_ids
        )
        assert not any(again.unk_token_id in ids for ids in again(texts).input_ids)
        assert again.tokenize("ABC") == again.tokenize("abc")
    stripped = train_tokenizer(texts * 9, 400, strip_accents=True)
    assert (
        stripped.decode(stripped(texts[0]).input_ids, skip_special_tokens=True) != texts[0].lower()
    )
    assert not recwarn


@pytest.mark.filterwarnings("ignore:.* of the letters of this text would lose an accent")
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("language", [*sorted(APART), "french"])
def test_an_accent_that_stands_apart_gives_the_same_pieces_and_the_same_tokenizer(
    language, lowercase, tmp_path
):
    french = [
        "Un élève français est déjà allé à l'école",
        "Voilà l'été très agréable près de la forêt où ÇA naît",
    ]
    texts = french if language == "french" else APART[language][0]
    whole, apart = (
        [unicodedata.normalize(form, text) for text in texts] for form in ("NFC", "NFD")
    )
    tokenizer, other = (
        train_tokenizer(form * 9, 400, lowercase=lowercase) for form in (whole, apart)
    )
    assert other.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    tokenizer.save_pretrained(tmp_path)
    for again in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        made = again(apart, return_offsets_mapping=True)
        assert made.input_ids == again(whole).input_ids and again.unk_token_id not in sum(
            made.input_ids, []
        )
        for text, offsets in zip(
            apart, made.offset_mapping
        ):  # no letter and no accent is in no piece, or in two
            assert "".join(
                text[start:stop] for start, stop in fit_offsets(text, offsets)
            ) == text.replace(" ", "")
    before, after = (len("".join(form).replace(" ", "").encode()) for form in (apart, whole))
    assert (
        language == "hindi"
        or after < before
        and f"makes {after / before:.2f}" in normalization_note(apart, tokenizer)
    )


def test_english_is_stripped_as_ever_and_a_few_foreign_names_change_nothing(recwarn):
    texts = [*TEXTS, "a naïve CAFÉ in São Paulo", "서울"]
    tokenizer = train_tokenizer(texts, 900)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] == {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    }
    assert tokenizer("CAFÉ").input_ids == tokenizer("cafe").input_ids and not recwarn
    assert tokenizer.get_vocab() == train_tokenizer(texts, 900, strip_accents=True).get_vocab()


def test_a_gap_changes_the_pieces_of_its_own_word_alone():
    texts = ["The cat sat on the mat. It was a cat, and the dog was not.", "我爱北京,天安门。"] * 20
    tokenizer = train_tokenizer(texts, 80, kind="unigram")
    for text, word in ((texts[0], "cat"), (texts[0], "mat"), (texts[0], "The"), (texts[1], "北京")):
        gapped = tokenizer(text.replace(word, "[MASK]", 1), return_offsets_mapping=True)
        whole = tokenizer(text, return_offsets_mapping=True)
        behind = text.index(word) + len(word)  # a piece of Chinese may reach over the word
        kept = [
            id
            for id, (start, stop) in zip(whole.input_ids, whole.offset_mapping)
            if start >= behind and start < stop
        ]
        assert kept and gapped.input_ids[-1 - len(kept) : -1] == kept
        assert (
            tokenizer.convert_tokens_to_ids("▁")
            not in gapped.input_ids[gapped.input_ids.index(tokenizer.mask_token_id) :]
        )
    assert (
        tokenizer.tokenize("  The \n cat ")
        == tokenizer.tokenize("The cat")
        != tokenizer.tokenize("The cat .")
    )
    assert (
        tokenizer(["The", "cat"], is_split_into_words=True).input_ids
        == tokenizer("The cat").input_ids
    )
    assert tokenizer.decode(tokenizer("The cat.").input_ids, skip_special_tokens=True) == "The cat."


def test_byte_level_bpe_joins_a_letter_with_its_marks_and_cuts_english_as_gpt2():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    hindi = ["मैं किताब पढ़ता हूँ और वह किताब लिखती है", "मेरी किताब मेज़ पर है"] * 40
    tokenizer = train_tokenizer(hindi, 600, kind="bpe")
    assert len(tokenizer.tokenize(" किताब")) == 1
    assert tokenizer.decode(tokenizer(hindi[0], add_special_tokens=False).input_ids) == hindi[0]
    ours, theirs = (
        tokenizer.backend_tokenizer.pre_tokenizer,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    for text in [
        *TEXTS,
        "น้ำเย็น ดีมาก",
        "I don't  know,\n\t it's 12 o'clock! ❤️ 1️⃣ naïve\u00a0x_1 \n ",
    ]:
        assert [word for word, _ in ours.pre_tokenize_str(text)] == [
            word for word, _ in theirs.pre_tokenize_str(text)
        ]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = theirs
    plain.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=[*SPECIAL_TOKENS.values()],
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    assert train_tokenizer(TEXTS, 900, kind="bpe").get_vocab() == plain.get_vocab()


def test_it_is_noted_where_normalising_changes_the_bytes_of_a_text():
    korean, hindi = APART["korean"][0] * 9, APART["hindi"][0] * 9
    for texts, share in (
        (korean, "2.31"),
        (hindi, "0.73"),
    ):  # two jamo or three for a syllable; signs
        stripped = train_tokenizer(texts, 400, strip_accents=True)
        assert f"makes {share}" in normalization_note(
            texts, stripped
        ) and "bits per byte" in normalization_note(texts, stripped)
        assert normalization_note(texts, train_tokenizer(texts, 400, lowercase=False)) == ""
    for kind in KINDS:
        assert normalization_note(TEXTS, train_tokenizer(TEXTS, 900, kind=kind)) == ""
    assert "0.33" in normalization_note(
        ["ＡＢＣ１２３"], train_tokenizer(TEXTS, 900, kind="unigram")
    )
