"Labels of words, texts and answers: each at its tokens, and back to the text."

import copy
import functools
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.documents import grapheme_span
from bertlab.data.rows import RowError
from bertlab.data.supervised import (
    PROBLEMS,
    QuestionAnsweringCollator,
    SequenceClassificationCollator,
    SpanClassificationCollator,
    TokenClassificationCollator,
    align_labels,
    sliding_windows,
)
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.answers import rank_answers

many = settings(max_examples=120, deadline=None, derandomize=True)
NO = -100  # no label
TEXTS = [
    "The quick brown fox jumps over the lazy dog; Zoë paid €5 in São Paulo, didn't she?",
    "Who wrote it, where and when: in 1984, a naïve question about unbelievable tokenization.",
]


def byte_level(add_prefix_space: bool):
    "A small byte-level BPE tokenizer, of the kind of ModernBERT's (no prefix space) or RoBERTa's."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS * 5, trainer)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=add_prefix_space
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        mask_token="<mask>",
        unk_token="<unk>",
    )


@functools.cache
def tokenizer_of(algorithm: str):
    if algorithm == "wordpiece":
        return train_tokenizer(TEXTS * 5, 150)
    return byte_level(algorithm == "bpe with prefix space")


KINDS = "wordpiece", "bpe", "bpe with prefix space"
each_tokenizer = pytest.mark.parametrize("algorithm", KINDS)
words_and_labels = st.lists(
    st.tuples(st.sampled_from(["Zoë", "didn't", "x", "tokenization", "€5", "\u200b", "naïve", "日本"]), st.integers(-1, 4)),
    min_size=1, max_size=12,
).filter(lambda pairs: any(word.strip("\u200b") for word, _ in pairs))  # fmt: skip


def tagger(algorithm, **options):
    options = {"text_column": "tokens", "label_column": "tags", "pad_to_multiple_of": 1, **options}
    return TokenClassificationCollator.from_tokenizer(tokenizer_of(algorithm), **options)


# --- token classification -------------------------------------------------------------------------


@pytest.mark.parametrize("options, expected", [
    ((), [NO, 7, NO, 8, 9, NO, NO]),
    ((True,), [NO, 7, 7, 8, 9, 9, NO]),
])  # fmt: skip
def test_first_or_all_sub_words_have_labels(options, expected):
    assert align_labels([None, 0, 0, 1, 2, 2, None], [7, 8, 9], *options) == expected


@each_tokenizer
def test_words_get_the_ids_of_running_text(algorithm):
    words = "Zoë paid €5 in São Paulo".split()
    ids = tagger(algorithm, label_column=None)([{"tokens": words}])["input_ids"][0].tolist()
    assert ids == tokenizer_of(algorithm)(" ".join(words))["input_ids"]


@many
@given(words_and_labels, st.sampled_from(KINDS), st.integers(4, 40))
def test_labels_are_at_their_words_and_lost_ones_counted(pairs, algorithm, length):
    "The reference tokenizes each word alone and knows no word ids."
    tokenizer, words = tokenizer_of(algorithm), [word for word, _ in pairs]
    labels = [label if label >= 0 else NO for _, label in pairs]
    rows = [{"tokens": words, "tags": labels}]
    batch = tagger(algorithm, max_sequence_length=length)(rows)
    ids, expected, lost = [], [], 0
    for n, (word, label) in enumerate(zip(words, labels)):
        is_joined = words[n - 1 : n + 1] == ["日本", "日本"]  # Japanese has no space there
        space = " " if algorithm == "bpe" and n and not is_joined else ""
        pieces = tokenizer(space + word, add_special_tokens=False)["input_ids"]
        room = length - 2 - len(ids)
        lost += label != NO and not pieces[:room]
        ids += pieces[:room]
        expected += ([label] + [NO] * len(pieces))[: min(room, len(pieces))]
    assert batch["input_ids"][0, 1 : 1 + len(ids)].tolist() == ids
    assert batch["labels"][0].tolist() == [NO, *expected, NO]
    assert batch["num_dropped_labels"].tolist() == [lost]


@many
@given(words_and_labels, st.sampled_from(KINDS), st.integers(8, 20))
def test_split_rows_hold_each_word_once(pairs, algorithm, length):
    words, labels = zip(*((word, max(label, 0)) for word, label in pairs))
    rows = [{"tokens": ["x"], "tags": [0]}, {"tokens": list(words), "tags": list(labels)}]
    pieces = tagger(algorithm, max_sequence_length=length, split=True).encode(rows)[1:]
    displayed = [
        piece["first_word"] + word
        for piece in pieces
        for word in dict.fromkeys(piece["word_ids"])
        if word is not None
    ]
    assert len(set(displayed)) == len(displayed) and displayed == sorted(displayed)
    lost = set(range(len(words))) - set(displayed)
    assert all(words[n] == "\u200b" for n in lost)
    assert sum(piece["num_dropped_labels"] for piece in pieces) == len(lost)
    assert [i for piece in pieces for i in piece["labels"] if i != NO] == [
        labels[n] for n in displayed
    ]
    assert {piece["example_index"] for piece in pieces} == {1}


def test_rows_are_padded_as_transformers_pads_them():
    from transformers import DataCollatorForTokenClassification

    rows = [
        {"input_ids": [2, 9, 10, 3], "labels": [NO, 1, 0, NO]},
        {"input_ids": [2, 8, 3], "labels": [NO, 2, NO]},
    ]
    reference = DataCollatorForTokenClassification(tokenizer_of("wordpiece"), pad_to_multiple_of=8)
    expected = reference([dict(row) for row in rows])
    result = tagger("wordpiece", label_column="labels", pad_to_multiple_of=8)(rows)
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(result[name], expected[name])


def test_packed_rows_keep_their_labels_and_padding_has_none():
    row = {
        "input_ids": [2, 9, 3, 2, 8, 7, 3, 0], "attention_mask": [1, 1, 1, 2, 2, 2, 2, 0],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 0], "special_tokens_mask": [1, 0, 1, 1, 0, 0, 1, 1],
        "tags": [0, 1, 0, 0, 2, 3, 0, 0],
    }  # fmt: skip
    batch = tagger("wordpiece")([row])
    assert batch["labels"].tolist() == [[NO, 1, NO, NO, 2, 3, NO, NO]]
    assert batch["attention_mask"].tolist() == [row["attention_mask"]]
    assert batch["position_ids"].tolist() == [row["position_ids"]]
    del row["special_tokens_mask"]
    assert tagger("wordpiece")([row])["labels"][0, -1] == NO


@pytest.mark.parametrize("wrap", [list, tuple, np.array, torch.tensor])
def test_rows_of_ids_are_lists_arrays_or_tensors(wrap):
    row = {"input_ids": wrap([2, 9, 3]), "tags": wrap([NO, 1, NO])}
    assert tagger("wordpiece")([row])["labels"].tolist() == [[NO, 1, NO]]


# --- sequence classification ----------------------------------------------------------------------


def classifier(**options):
    options = {"pad_to_multiple_of": 1, "max_sequence_length": 32, **options}
    return SequenceClassificationCollator.from_tokenizer(tokenizer_of("wordpiece"), **options)


@many
@given(
    st.sampled_from(KINDS),
    st.integers(1, 25),
    st.integers(0, 25),
    st.integers(8, 30),
    st.booleans(),
)
def test_texts_and_pairs_are_cut_as_transformers_cuts(algorithm, first, second, length, cuts_left):
    tokenizer = copy.deepcopy(tokenizer_of(algorithm))
    tokenizer.truncation_side = "left" if cuts_left else "right"
    if algorithm == "wordpiece":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    row = {"text": "fox " * first, "b": "dog " * second, "label": 1}
    texts = [row["text"], row["b"]][: 1 + bool(second)]
    collate = SequenceClassificationCollator.from_tokenizer(
        tokenizer, text_pair_column="b" if second else None, max_sequence_length=length
    )
    expected = tokenizer(*texts, truncation=True, max_length=length)
    batch, size = collate([row]), len(expected["input_ids"])
    assert batch["input_ids"][0, :size].tolist() == expected["input_ids"]
    assert int((batch["attention_mask"] > 0).sum()) == size
    if algorithm == "wordpiece":
        assert batch["token_type_ids"][0, :size].tolist() == expected["token_type_ids"]


@pytest.mark.parametrize("problem, labels, expected", [
    (PROBLEMS[0], [0, 2], torch.tensor([0, 2])), (PROBLEMS[1], [[1, 0, 1], [0, 0, 0]], torch.tensor([[1.0, 0, 1], [0, 0, 0]])),
    (PROBLEMS[2], [0.5, -3], torch.tensor([0.5, -3])), (PROBLEMS[2], [[0.5, 1], [2, 3]], torch.tensor([[0.5, 1], [2, 3]])),
])  # fmt: skip
def test_labels_have_the_type_and_shape_of_the_loss(problem, labels, expected):
    rows = [{"text": "dog", "label": label} for label in labels]
    got = classifier(problem_type=problem)(rows)["labels"]
    assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_text_that_spells_a_special_token_has_none():
    ids = classifier(label_column=None)([{"text": "the [SEP] dog"}])["input_ids"][0].tolist()
    assert ids.count(tokenizer_of("wordpiece").sep_token_id) == 1


# --- question answering ---------------------------------------------------------------------------

CONTEXT = (
    "Zoë paid €5 in\tSão Paulo. In 1984 a naïve\nfox paid €5 too; 日本 paid nothing, didn't it?"
)
ANSWERS = [  # Unicode, a tab inside an answer, answers that occur twice, no answer
    ("Where?", ["São Paulo"], [15]),
    ("How much?", ["€5", "€5"], [51, 9]),
    ("What is said?", ["in\tSão"], [12]),
    ("Who then?", ["日本"], [59]),
    ("Why?", [], []),
]
RECORDS = [
    {"question": q, "context": CONTEXT, "answers": {"text": texts, "answer_start": starts}}
    for q, texts, starts in ANSWERS
]


def reader(algorithm, **options):
    options = {"max_sequence_length": 40, "doc_stride": 10, "pad_to_multiple_of": 1, **options}
    return QuestionAnsweringCollator.from_tokenizer(tokenizer_of(algorithm), **options)


@pytest.mark.parametrize("length, stride", [(512, 128), (384, 128), (60, 20)])
def test_windows_share_a_third_at_most_by_default(length, stride):
    assert reader("bpe", max_sequence_length=length, doc_stride=None).doc_stride == stride


contexts = st.text(alphabet="abé€ 日\t\n.'\u200b", min_size=1, max_size=90).filter(str.strip)


@many
@given(contexts, st.data(), st.sampled_from(KINDS), st.integers(1, 6), st.integers(16, 30))
def test_an_answer_is_marked_in_the_windows_that_hold_it(context, data, algorithm, stride, length):
    start = data.draw(st.integers(0, len(context) - 1))
    stop = data.draw(st.integers(start + 1, min(len(context), start + 12)))
    answer = context[start:stop]
    if not answer.strip():
        return
    answers = [{"text": answer, "answer_start": start}]
    record = {"question": "a?", "context": context, "answers": answers}
    batch = reader(algorithm, max_sequence_length=length, doc_stride=stride)([record])
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    offsets_of_text = tokenizer_of(algorithm)(context, **options)["offset_mapping"]
    inner = range(start + len(answer) - len(answer.lstrip()), start + len(answer.rstrip()))
    touches = lambda offset: offset[1] > inner.start and offset[0] < inner.stop
    touching = [offset for offset in offsets_of_text if touches(offset)]
    spans = torch.stack([batch["start_positions"], batch["end_positions"]], 1).tolist()
    for offsets, span in zip(batch["offsets"].tolist(), spans):
        held = [n for n, offset in enumerate(offsets) if touches(offset)]
        is_whole = len(held) == len(touching) > 0
        assert span == ([held[0], held[-1]] if is_whole else [0, 0])
    assert batch["num_dropped_labels"].sum() == int(not batch["start_positions"].any())


@each_tokenizer
def test_windows_share_doc_stride_tokens_and_lose_none(algorithm):
    batch = reader(algorithm, doc_stride=7, max_sequence_length=24, label_column=None)([RECORDS[0]])
    is_inside = batch["offsets"][:, :, 0] >= 0
    tokens = [ids[held].tolist() for ids, held in zip(batch["input_ids"], is_inside)]
    assert len(tokens) > 1
    expected = tokenizer_of(algorithm)(CONTEXT, add_special_tokens=False)["input_ids"]
    assert tokens[0] + [token for row in tokens[1:] for token in row[7:]] == expected
    assert all(before[-7:] == after[:7] for before, after in zip(tokens, tokens[1:]))


@each_tokenizer
def test_windows_are_those_of_transformers(algorithm):
    text, tokenizer = CONTEXT * 3, tokenizer_of(algorithm)
    expected = tokenizer(
        "Why?", text, truncation="only_second", max_length=40, stride=10,
        return_overflowing_tokens=True,
    )["input_ids"]  # fmt: skip
    rows = reader(algorithm, label_column=None).encode([{"question": "Why?", "context": text}])
    assert [row["input_ids"] for row in rows] == expected


@many
@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 11))
def test_sliding_windows_cover_every_token_and_no_more(length, size, stride):
    stride = min(stride, size - 1)
    windows = sliding_windows(length, size, stride)
    assert {i for a, b in windows for i in range(a, b)} == set(range(length))
    assert all(b - a == size for a, b in windows[:-1])
    assert all(b - c == stride for (_, b), (c, _) in zip(windows, windows[1:]))


@each_tokenizer
def test_the_best_answer_is_cut_out_of_the_text_to_the_character(algorithm):
    encoded = reader(algorithm).encode(RECORDS)
    batch = reader(algorithm)(encoded)
    assert len(encoded) == len(batch["input_ids"]) > len(RECORDS)
    starts, ends = torch.zeros(batch["input_ids"].shape), torch.zeros(batch["input_ids"].shape)
    rows = torch.arange(len(starts))
    starts[rows, batch["start_positions"]], ends[rows, batch["end_positions"]] = 5.0, 5.0
    # A window without the answer is sure of that; where another window holds it, it wins.
    answered = batch["start_positions"] > 0
    starts[answered, batch["start_positions"][answered]] = 9.0
    windows = batch["offsets"], batch["example_index"]
    best = rank_answers(starts, ends, *windows, [r["context"] for r in RECORDS])
    for n, record in enumerate(RECORDS):
        held = bool(answered[batch["example_index"] == n].any())
        assert best[n][0].text == (record["answers"]["text"][0] if held else "")
        for answer in best[n]:
            assert answer.text == CONTEXT[answer.start : answer.stop]
    assert best[1][0].start == 51, "the second of two equal texts was marked"


def trimming(words: bool, add_prefix_space: bool):
    "A tokenizer that adds spaces and, to trim them, cuts a letter off the first or of each word."
    from tokenizers import pre_tokenizers, processors

    tokenizer = copy.deepcopy(byte_level(True))
    backend = tokenizer.backend_tokenizer
    if words:
        split = pre_tokenizers.WhitespaceSplit()
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    ends = ("</s>", 2), ("<s>", 0)
    backend.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=add_prefix_space)
    return tokenizer


@pytest.mark.parametrize("words, add_prefix_space", [(False, False), (True, False), (True, True)])
def test_offsets_that_lose_letters_are_not_believed(words, add_prefix_space):
    tokenizer, text = trimming(words, add_prefix_space), "fox paid in São Paulo"
    bare = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert {n for a, b in bare["offset_mapping"] for n in range(a, b)} < {*range(len(text))} - {
        3,
        8,
    }
    options = {"tokenizer": tokenizer, "max_sequence_length": 64}
    for answer in ("fox", "paid", "São Paulo"):
        start = text.index(answer)
        spans = SpanClassificationCollator.from_tokenizer(**options)
        span = {"start": start, "end": start + len(answer), "label": 0}
        [row] = spans.encode([{"text": text, "spans": [span]}])
        [(first, last, _)] = row["labels"].tolist()
        assert (row["offsets"][first, 0], row["offsets"][last, 1]) == (span["start"], span["end"])
        answers = QuestionAnsweringCollator.from_tokenizer(**options, doc_stride=4)
        record = {
            "question": "Who?",
            "context": text,
            "answers": [{"text": answer, "answer_start": start}],
        }
        batch = answers([record])
        logits = [torch.nn.functional.one_hot(batch[f"{end}_positions"], batch["input_ids"].shape[1])
                  for end in ("start", "end")]  # fmt: skip
        assert rank_answers(*logits, batch["offsets"], [0], [text])[0][0].text == answer


def test_tokens_at_other_letters_are_refused():
    class Shifted:  # what it says of texts is one letter, or one word, too far to the left
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def __len__(self):
            return len(self.tokenizer)

        def __deepcopy__(self, memo):
            return Shifted(copy.deepcopy(self.tokenizer))

        def __call__(self, *texts, **options):
            encoded = self.tokenizer(*texts, **options)
            ids_of = encoded.word_ids
            encoded.word_ids = lambda n: [max(0, word - 1) for word in ids_of(n)]
            if options.get("return_offsets_mapping"):
                shift = lambda spans: [(max(0, a - 1), b - 1) for a, b in spans]
                encoded["offset_mapping"] = [*map(shift, encoded["offset_mapping"])]
            return encoded

    tokenizer, text = byte_level(False), "Zoë paid in São Paulo"
    options = {"max_sequence_length": 64}
    makes = {
        SpanClassificationCollator: {"text": text, "spans": []},
        QuestionAnsweringCollator: {"question": "Who?", "context": text, "answers": []},
        TokenClassificationCollator: {"text": text.split(), "labels": [0] * 5},
    }
    for make, row in makes.items():
        stride = {"doc_stride": 4} if make is QuestionAnsweringCollator else {}
        assert make.from_tokenizer(tokenizer, **options, **stride).encode([row])
        collate = make.from_tokenizer(Shifted(tokenizer), **options, **stride)
        with pytest.raises(ValueError, match="stands for"):
            collate.encode([row])


def test_a_blank_row_and_the_question_are_never_an_answer():
    offsets = np.array([[[-1, -1], [-1, -1], [0, 3], [4, 8]], [[-1, -1]] * 4])
    logits = np.array([[0.0, 90, 1, 2], [99, 99, 99, 99]])
    best = rank_answers(logits, logits, offsets, [0, -1], ["the fox."], max_answer_tokens=1)
    assert list(best) == [0] and [answer.text for answer in best[0]] == ["fox.", "the", ""]


# --- mistakes -------------------------------------------------------------------------------------

GOOD = {"tokens": ["a", "b"], "tags": [0, 1], "text": "dog", "label": 0}


@pytest.mark.parametrize("make, row, words", [
    (lambda: tagger("wordpiece"), {"body": ["a"]}, ["'tokens'", "body"]),
    (lambda: tagger("wordpiece"), {"tokens": "a b", "tags": [0]}, ["'tokens'", "a b"]),
    (lambda: tagger("wordpiece"), {"tokens": [], "tags": []}, ["'tokens'"]),
    (lambda: tagger("wordpiece"), {"tokens": ["a", "b"]}, ["'tags'"]),
    (lambda: tagger("wordpiece"), {"tokens": ["a", "b"], "tags": [0]}, ["'tags'", "1", "2 words"]),
    (lambda: classifier(), {"text": "  ", "label": 0}, ["'text'"]),
    (lambda: classifier(), {"text": "dog"}, ["'label'"]),
])  # fmt: skip
def test_a_mistake_is_named_by_row_and_column(make, row, words):
    with pytest.raises(RowError) as error:
        make()([GOOD, row])
    assert error.value.row == 1 and all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("label", ["positive", 0.5])
def test_a_class_is_an_id(label):
    with pytest.raises(ValueError, match=f"'label'.*{label}"):
        classifier()([{"text": "dog", "label": label}])


@pytest.mark.parametrize("change, word", [
    ({"answers": {"text": ["São"], "answer_start": [14]}}, "15"),
    ({"answers": {"text": ["São"], "answer_start": [-4]}}, "-4"),
    ({"answers": {"text": ["São", "x"], "answer_start": [15]}}, "'answers'"),
    ({"answers": {"text": [" "], "answer_start": [3]}}, "'answers'"),
    ({"answers": "São"}, "'answers'"), ({"context": ""}, "'context'"),
    ({"question": "why " * 40}, "doc_stride"),
])  # fmt: skip
def test_a_wrong_record_is_refused_by_its_row(change, word):
    with pytest.raises(RowError, match="row 1") as error:
        reader("wordpiece")([RECORDS[0], {**RECORDS[0], **change}])
    assert word in str(error.value)


# --- scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, letters", [
    (unicodedata.normalize("NFD", "한국 가"), [3, 3, 1, 2]), ("간\u11ab", [2]),  # syllables in parts
    ("\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", [2, 2]), ("a\U0001f1e9b", [1, 1, 1]),  # flags
    ("\U0001f469\U0001f3fd\u200d\u2695\ufe0fx", [5, 1]), ("\U0001f3f4\U000e0067\U000e007fx", [3, 1]),
    ("e\u0301a", [2, 1]), ("北京", [1, 1]),
])  # fmt: skip
def test_a_span_never_ends_inside_a_letter(text, letters):
    edges = [0, *np.cumsum(letters).tolist()]
    assert edges[-1] == len(text)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            expected = max(e for e in edges if e <= start), min(e for e in edges if e >= stop)
            assert grapheme_span(text, start, stop) == expected


def test_chinese_words_bring_no_space_to_byte_level_bpe():
    texts = ["我爱北京天安门", "北京大学在北京", "the cat sat in Beijing"] * 40
    tokenizer = train_tokenizer(texts, 400, kind="bpe")
    collate = TokenClassificationCollator.from_tokenizer(tokenizer, max_sequence_length=64)
    words = [list("北京大学"), ["我", "爱", "the", "cat", "北", "京"]]
    rows = [{"text": text, "labels": list(range(len(text)))} for text in words]
    for row, encoded, text in zip(rows, collate.encode(rows), ("北京大学", "我爱 the cat 北京")):
        assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == text
        assert [label for label in encoded["labels"] if label != NO] == row["labels"]
