"Labels of words, texts and answers: each where it belongs, and back to the text they came from."

import functools
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data import supervised
from bertlab.data.supervised import (
    PROBLEMS,
    QuestionAnsweringCollator,
    SequenceClassificationCollator,
    TokenClassificationCollator,
    align_labels,
    continue_entities,
    whole_letters,
)
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.answers import rank_answers

many = settings(max_examples=120, deadline=None, derandomize=True)
IGNORE_INDEX = -100
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
def tokenizer_of(kind: str):
    if kind == "wordpiece":
        return train_tokenizer(TEXTS * 5, 150)
    return byte_level(kind == "bpe with prefix space")


KINDS = "wordpiece", "bpe", "bpe with prefix space"
each_tokenizer = pytest.mark.parametrize("kind", KINDS)
words_and_labels = st.lists(
    st.tuples(st.sampled_from(["Zoë", "didn't", "x", "tokenization", "€5", "\u200b", "naïve", "日本"]), st.integers(-1, 4)),
    min_size=1, max_size=12,
).filter(lambda pairs: any(word.strip("\u200b") for word, _ in pairs))  # fmt: skip


def tagger(kind, **options):
    options = {"text_column": "tokens", "label_column": "tags", "pad_to_multiple_of": 1, **options}
    return TokenClassificationCollator.from_tokenizer(tokenizer_of(kind), **options)


# --- token classification -------------------------------------------------------------------------


def test_first_sub_words_are_labelled_or_all_of_them():
    word_ids, labels = [None, 0, 0, 1, 2, 2, None], [7, 8, 9]
    assert align_labels(word_ids, labels) == [
        IGNORE_INDEX,
        7,
        IGNORE_INDEX,
        8,
        9,
        IGNORE_INDEX,
        IGNORE_INDEX,
    ]
    assert align_labels(word_ids, labels, all_subwords=True) == [
        IGNORE_INDEX,
        7,
        7,
        8,
        9,
        9,
        IGNORE_INDEX,
    ]
    assert align_labels(word_ids, labels, True, {7: 9, 8: 7}) == [
        IGNORE_INDEX,
        7,
        9,
        8,
        9,
        9,
        IGNORE_INDEX,
    ]
    assert align_labels(word_ids, labels, False, {7: 9}) == [
        IGNORE_INDEX,
        7,
        IGNORE_INDEX,
        8,
        9,
        IGNORE_INDEX,
        IGNORE_INDEX,
    ]


@pytest.mark.parametrize("names, expected", [
    (["O", "B-X", "I-X", "B-Y", "I-Z"], {1: 2}),  # nothing goes on with a Y
    (["I", "B", "O"], {1: 0}),
    (["B-X", "I-X", "NOUN"], {}),  # not IOB2: nothing is known of what a B begins
    (["O"], {}), ([], {}),
])  # fmt: skip
def test_what_begins_an_entity_goes_on_as_its_inside(names, expected):
    assert continue_entities(names) == expected


@each_tokenizer
def test_words_get_the_ids_of_the_running_text(kind):
    words = "Zoë paid €5 in São Paulo".split()
    ids = tagger(kind, label_column=None)([{"tokens": words}])["input_ids"][0].tolist()
    assert ids == tokenizer_of(kind)(" ".join(words))["input_ids"]


@many
@given(words_and_labels, st.sampled_from(KINDS), st.booleans(), st.integers(4, 40))
def test_each_label_stands_on_its_own_word_and_lost_ones_are_counted(
    pairs, kind, all_subwords, length
):
    "The reference knows nothing of word ids: it tokenizes each word alone and lays them end to end."
    tokenizer = tokenizer_of(kind)
    words, labels = (
        [word for word, _ in pairs],
        [label if label >= 0 else IGNORE_INDEX for _, label in pairs],
    )
    batch = tagger(kind, max_sequence_length=length, label_all_subwords=all_subwords)(
        [{"tokens": words, "tags": labels}]
    )
    ids, expected, lost = [], [], 0
    for number, (word, label) in enumerate(zip(words, labels)):
        joined = words[number - 1 : number + 1] == [
            "日本",
            "日本",
        ]  # Japanese puts no space between its words
        spaced = (" " if kind == "bpe" and number and not joined else "") + word
        pieces = tokenizer(spaced, add_special_tokens=False)["input_ids"]
        room = length - 2 - len(ids)
        lost += label != IGNORE_INDEX and not pieces[:room]
        ids += pieces[:room]
        expected += (
            (
                [label] * len(pieces)
                if all_subwords
                else [label] + [IGNORE_INDEX] * (len(pieces) - 1)
            )[:room]
            if pieces
            else []
        )
    assert batch["input_ids"][0, 1 : 1 + len(ids)].tolist() == ids
    assert batch["labels"][0].tolist() == [IGNORE_INDEX, *expected, IGNORE_INDEX]
    assert batch["num_dropped_labels"].tolist() == [lost]
    assert ("begins_word" in batch) == all_subwords
    if all_subwords:  # as if only first sub-words had been labelled
        first = tagger(kind, max_sequence_length=length)([{"tokens": words, "tags": labels}])[
            "labels"
        ]
        assert torch.equal(
            batch["labels"].masked_fill(batch["begins_word"] == 0, IGNORE_INDEX), first
        )


def test_aligned_rows_are_padded_as_transformers_pads_them():
    from transformers import DataCollatorForTokenClassification

    tokenizer = tokenizer_of("wordpiece")
    rows = [
        {"input_ids": [2, 9, 10, 3], "labels": [IGNORE_INDEX, 1, 0, IGNORE_INDEX]},
        {"input_ids": [2, 8, 3], "labels": [IGNORE_INDEX, 2, IGNORE_INDEX]},
    ]
    theirs = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)(
        [dict(row) for row in rows]
    )
    ours = tagger("wordpiece", label_column="labels", pad_to_multiple_of=8)(rows)
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(ours[name], theirs[name])


def test_packed_rows_keep_their_labels_and_padding_has_none():
    row = {
        "input_ids": [2, 9, 3, 2, 8, 7, 3, 0], "attention_mask": [1, 1, 1, 2, 2, 2, 2, 0],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 0], "special_tokens_mask": [1, 0, 1, 1, 0, 0, 1, 1],
        "tags": [0, 1, 0, 0, 2, 3, 0, 0],
    }  # fmt: skip
    batch = tagger("wordpiece")([row])
    assert batch["labels"].tolist() == [
        [IGNORE_INDEX, 1, IGNORE_INDEX, IGNORE_INDEX, 2, 3, IGNORE_INDEX, IGNORE_INDEX]
    ]
    assert batch["attention_mask"].tolist() == [row["attention_mask"]]
    assert batch["position_ids"].tolist() == [row["position_ids"]]


def test_padding_of_a_packed_row_has_no_label_even_if_it_was_given_one():
    row = {
        "input_ids": [2, 9, 3, 0],
        "attention_mask": [1, 1, 1, 0],
        "position_ids": [0, 1, 2, 0],
        "tags": [IGNORE_INDEX, 1, IGNORE_INDEX, 0],
    }
    assert tagger("wordpiece")([row])["labels"].tolist() == [
        [IGNORE_INDEX, 1, IGNORE_INDEX, IGNORE_INDEX]
    ]


@pytest.mark.parametrize("wrap", [list, tuple, np.array, torch.tensor])
def test_aligned_rows_may_come_as_lists_arrays_or_tensors(wrap):
    row = {"input_ids": wrap([2, 9, 3]), "tags": wrap([IGNORE_INDEX, 1, IGNORE_INDEX])}
    assert tagger("wordpiece")([row])["labels"].tolist() == [[IGNORE_INDEX, 1, IGNORE_INDEX]]


# --- sequence classification ----------------------------------------------------------------------


def classifier(**options):
    options = {"pad_to_multiple_of": 1, "max_sequence_length": 32, **options}
    return SequenceClassificationCollator.from_tokenizer(tokenizer_of("wordpiece"), **options)


@each_tokenizer
def test_pairs_are_encoded_as_pairs(kind):
    tokenizer = tokenizer_of(kind)
    collate = SequenceClassificationCollator.from_tokenizer(
        tokenizer, text_pair_column="b", pad_to_multiple_of=1
    )
    batch = collate([{"text": "Who wrote it", "b": "in 1984", "label": 1}])
    assert batch["input_ids"][0].tolist() == tokenizer("Who wrote it", "in 1984")["input_ids"]


def test_token_types_are_passed_where_the_tokenizer_makes_them():
    from copy import deepcopy

    tokenizer = deepcopy(tokenizer_of("wordpiece"))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    collate = SequenceClassificationCollator.from_tokenizer(
        tokenizer, text_pair_column="b", pad_to_multiple_of=1
    )
    batch = collate(
        [{"text": "x", "b": "dog", "label": 0}, {"text": "x", "b": "the lazy dog", "label": 0}]
    )
    expected = [
        tokenizer("x", "dog")["token_type_ids"],
        tokenizer("x", "the lazy dog")["token_type_ids"],
    ]
    assert 1 in expected[0] and batch["token_type_ids"][1].tolist() == expected[1]
    assert batch["token_type_ids"][0].tolist() == expected[0] + [0] * (
        len(expected[1]) - len(expected[0])
    )


@pytest.mark.parametrize(
    "problem, num_labels, labels, expected",
    [
        (PROBLEMS[0], 3, [0, 2], torch.tensor([0, 2])),
        (PROBLEMS[0], None, [np.int32(1), True], torch.tensor([1, 1])),
        (PROBLEMS[1], 3, [[1, 0, 1], [0, 0, 0]], torch.tensor([[1.0, 0, 1], [0, 0, 0]])),
        (PROBLEMS[2], 1, [0.5, -3], torch.tensor([0.5, -3])),
        (PROBLEMS[2], 2, [[0.5, 1], [2, 3]], torch.tensor([[0.5, 1], [2, 3]])),
    ],
)
def test_labels_have_the_type_and_shape_that_the_loss_needs(problem, num_labels, labels, expected):
    rows = [{"text": "dog", "label": label} for label in labels]
    got = classifier(problem_type=problem, num_labels=num_labels)(rows)["labels"]
    assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_text_that_spells_a_special_token_has_no_special_token():
    ids = classifier(label_column=None)([{"text": "the [SEP] dog"}])["input_ids"][0].tolist()
    assert ids.count(tokenizer_of("wordpiece").sep_token_id) == 1


# --- question answering ---------------------------------------------------------------------------

CONTEXT = (
    "Zoë paid €5 in\tSão Paulo. In 1984 a naïve\nfox paid €5 too; 日本 paid nothing, didn't it?"
)
RECORDS = [  # in SQuAD's form: Unicode, a tab inside an answer, answers that occur twice, no answer
    {
        "id": "a",
        "question": "Where?",
        "context": CONTEXT,
        "answers": {"text": ["São Paulo"], "answer_start": [15]},
    },
    {
        "id": "b",
        "question": "How much?",
        "context": CONTEXT,
        "answers": {"text": ["€5", "€5"], "answer_start": [51, 9]},
    },
    {
        "id": "c",
        "question": "What is said?",
        "context": CONTEXT,
        "answers": {"text": ["in\tSão"], "answer_start": [12]},
    },
    {
        "id": "d",
        "question": "Who then?",
        "context": CONTEXT,
        "answers": {"text": ["日本"], "answer_start": [59]},
    },
    {
        "id": "e",
        "question": "Why?",
        "context": CONTEXT,
        "answers": {"text": [], "answer_start": []},
    },
]


def reader(kind, **options):
    options = {"max_sequence_length": 40, "doc_stride": 10, "pad_to_multiple_of": 1, **options}
    return QuestionAnsweringCollator.from_tokenizer(tokenizer_of(kind), **options)


def brute_force_spans(row, batch, start, stop, cls=0):
    "By trying every pair of tokens: that whose ends touch the answer, and which has all of it."
    offsets = batch["offsets"][row].tolist()
    answer = {c for c in range(start, stop) if not CONTEXT[c].isspace()}
    touch = [i for i, (a, b) in enumerate(offsets) if answer & set(range(a, b))]
    held = {
        (i, j) for i in touch for j in touch if answer <= set(range(offsets[i][0], offsets[j][1]))
    }
    return (min(i for i, _ in held), max(j for _, j in held)) if held else (cls, cls)


@each_tokenizer
def test_answers_of_squad_records_are_where_a_brute_force_search_finds_them(kind):
    collate, found = reader(kind), 0
    for record in RECORDS:
        batch, answers = collate([record]), record["answers"]
        spans = torch.stack((batch["start_positions"], batch["end_positions"]), 1).tolist()
        for row, span in enumerate(spans):
            if not answers["text"]:
                assert span == [0, 0]
                continue
            start = answers["answer_start"][0]
            expected = brute_force_spans(row, batch, start, start + len(answers["text"][0]))
            assert tuple(span) == expected
            if expected != (0, 0):
                first, last = batch["offsets"][row, span[0], 0], batch["offsets"][row, span[1], 1]
                assert CONTEXT[first:last] == answers["text"][0]
                found += 1
    assert found >= 4


contexts = st.text(alphabet="abé€ 日\t\n.'\u200b", min_size=1, max_size=90).filter(str.strip)


@many
@given(contexts, st.data(), st.sampled_from(KINDS), st.integers(1, 6), st.integers(16, 30))
def test_an_answer_is_marked_whole_in_every_window_that_holds_it_and_in_no_other(
    context, data, kind, stride, length
):
    start = data.draw(st.integers(0, len(context) - 1))
    stop = data.draw(st.integers(start + 1, min(len(context), start + 12)))
    answer = context[start:stop]
    if not answer.strip():
        return
    record = {
        "question": "a?",
        "context": context,
        "answers": [{"text": answer, "answer_start": start}],
    }
    batch = reader(kind, max_sequence_length=length, doc_stride=stride)([record])
    whole = tokenizer_of(kind)(context, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    inner = range(start + len(answer) - len(answer.lstrip()), start + len(answer.rstrip()))
    touching = [o for o in whole if o[1] > inner.start and o[0] < inner.stop]
    for offsets, first, last in zip(
        batch["offsets"].tolist(),
        batch["start_positions"].tolist(),
        batch["end_positions"].tolist(),
    ):
        held = [i for i, o in enumerate(offsets) if o[1] > inner.start and o[0] < inner.stop]
        ends = (
            touching
            and held
            and offsets[held[0]][0] == touching[0][0]
            and offsets[held[-1]][1] == touching[-1][1]
        )
        assert (first, last) == ((held[0], held[-1]) if ends else (0, 0))
    assert batch["num_dropped_labels"].sum() == int(not batch["start_positions"].any())


@each_tokenizer
def test_windows_share_doc_stride_tokens_and_lose_none(kind):
    batch = reader(kind, doc_stride=7, max_sequence_length=24, label_column=None)([RECORDS[0]])
    inside = batch["offsets"][:, :, 0] >= 0
    tokens = [ids[held].tolist() for ids, held in zip(batch["input_ids"], inside)]
    assert len(tokens) > 1
    whole = tokenizer_of(kind)(CONTEXT, add_special_tokens=False)["input_ids"]
    assert tokens[0] + [token for row in tokens[1:] for token in row[7:]] == whole
    assert all(before[-7:] == after[:7] for before, after in zip(tokens, tokens[1:]))


def test_several_answers_come_in_order_and_training_takes_the_first():
    batch = reader("wordpiece", max_answers=3, max_sequence_length=80)([RECORDS[1]])
    spans = batch["answer_spans"][0].tolist()
    assert [batch["start_positions"].item(), batch["end_positions"].item()] == spans[0]
    starts = [batch["offsets"][0, first, 0].item() for first, _ in spans[:2]]
    assert starts == [51, 9] and spans[2] == [IGNORE_INDEX, IGNORE_INDEX]


@each_tokenizer
def test_the_best_answer_is_cut_out_of_the_text_to_the_character(kind):
    encoded = reader(kind).encode(RECORDS)
    batch = reader(kind)(encoded)
    assert len(encoded) == len(batch["input_ids"]) > len(RECORDS)
    starts, ends = torch.zeros(batch["input_ids"].shape), torch.zeros(batch["input_ids"].shape)
    rows = torch.arange(len(starts))
    starts[rows, batch["start_positions"]], ends[rows, batch["end_positions"]] = 5.0, 5.0
    # A window without the answer is sure of that; where another window holds it, it wins.
    answered = batch["start_positions"] > 0
    starts[answered, batch["start_positions"][answered]] = 9.0
    best = rank_answers(
        starts, ends, batch["offsets"], batch["example_index"], [r["context"] for r in RECORDS]
    )
    for number, record in enumerate(RECORDS):
        held = bool(answered[batch["example_index"] == number].any())
        assert best[number][0].text == (record["answers"]["text"][0] if held else "")
        for answer in best[number]:
            assert answer.text == CONTEXT[answer.start : answer.stop]
    assert best[1][0].start == 51, "the second of two equal texts was marked"


def test_a_blank_row_and_the_question_are_never_an_answer():
    offsets = np.array([[[-1, -1], [-1, -1], [0, 3], [4, 8]], [[-1, -1]] * 4])
    logits = np.array([[0.0, 90, 1, 2], [99, 99, 99, 99]])
    best = rank_answers(logits, logits, offsets, [0, -1], ["the fox."], max_answer_tokens=1)
    assert list(best) == [0] and [answer.text for answer in best[0]] == ["fox.", "the", ""]


# --- mistakes -------------------------------------------------------------------------------------

GOOD = {"tokens": ["a", "b"], "tags": [0, 1], "text": "dog", "label": 0}


@pytest.mark.parametrize(
    "make, row, words",
    [
        (lambda: tagger("wordpiece"), {"body": ["a"]}, ["'tokens'", "list of words"]),
        (lambda: tagger("wordpiece"), {"tokens": "a b", "tags": [0]}, ["'tokens'", "list of words"]),
        (lambda: tagger("wordpiece"), {"tokens": [], "tags": []}, ["'tokens'", "empty"]),
        (lambda: tagger("wordpiece"), {"tokens": ["a", "b"]}, ["'tags'"]),
        (lambda: tagger("wordpiece"), {"tokens": ["a", "b"], "tags": [0, 1, 2]}, ["'tags'", "3 labels for 2 words"]),
        (lambda: tagger("wordpiece"), {"tokens": ["a", "b"], "tags": [0]}, ["'tags'", "1 labels for 2 words"]),
        (lambda: tagger("wordpiece", num_labels=2), {"tokens": ["a", "b"], "tags": [0, 2]}, ["'tags'", "label 2"]),
        (lambda: tagger("wordpiece"), {"tokens": ["a", "b"], "tags": [0, -1]}, ["'tags'", "label -1"]),
        (lambda: classifier(), {"label": 0}, ["'text'", "a text"]),
        (lambda: classifier(), {"text": "  ", "label": 0}, ["'text'", "empty"]),
        (lambda: classifier(), {"text": "dog"}, ["'label'"]),
        (lambda: classifier(), {"text": "dog", "label": "positive"}, ["'label'", "positive"]),
        (lambda: classifier(), {"text": "dog", "label": 0.5}, ["'label'", "0.5"]),
        (lambda: classifier(num_labels=2), {"text": "dog", "label": 2}, ["'label'", "label 2"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_row_and_column(make, row, words):
    with pytest.raises(ValueError) as error:
        make()([GOOD, row])
    assert all(word in str(error.value) for word in ["row 1", *words]), error.value


@pytest.mark.parametrize(
    "problem, label", [(PROBLEMS[1], [0, 2]), (PROBLEMS[1], [1]), (PROBLEMS[2], float("nan"))]
)
def test_a_target_of_another_kind_is_refused(problem, label):
    first = [0, 1] if problem == PROBLEMS[1] else 0.5
    with pytest.raises(ValueError, match="row 1: the column 'label'"):
        classifier(problem_type=problem)(
            [{"text": "dog", "label": first}, {"text": "dog", "label": label}]
        )


def test_labels_that_do_not_fit_their_ids_are_refused():
    for labels in ([1, 2], [1, 2, 3, 4], ["B", "O", "O"]):
        with pytest.raises(ValueError, match="row 1: labels"):
            tagger("wordpiece")(
                [
                    {"input_ids": [2, 9, 3], "tags": [0, 0, 0]},
                    {"input_ids": [2, 9, 3], "tags": labels},
                ]
            )


@pytest.mark.parametrize(
    "change, word",
    [
        ({"answers": {"text": ["São"], "answer_start": [14]}}, "first found at 15"),
        ({"answers": {"text": ["São"], "answer_start": [-4]}}, "at character -4"),
        ({"answers": {"text": ["São", "x"], "answer_start": [15]}}, "'answers'"),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "'answers'"),
        ({"answers": "São"}, "'answers'"),
        ({"context": ""}, "'context'"),
        ({"question": "why " * 40}, "doc_stride"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused_by_its_number(change, word):
    with pytest.raises(ValueError, match="row 1") as error:
        reader("wordpiece")([RECORDS[0], {**RECORDS[0], **change}])
    assert word in str(error.value)


@pytest.mark.parametrize("text, letters", [
    (unicodedata.normalize("NFD", "한국 가"), [3, 3, 1, 2]), ("간\u11ab", [2]),  # syllables in two and three parts
    ("\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", [2, 2]), ("a\U0001f1e9b", [1, 1, 1]),  # two flags; half of one
    ("\U0001f469\U0001f3fd\u200d\u2695\ufe0fx", [5, 1]), ("\U0001f3f4\U000e0067\U000e007fx", [3, 1]),  # a doctor; a region
    ("e\u0301a", [2, 1]), ("می\u200dخو", [1, 1, 1, 1, 1]), ("北京", [1, 1]),  # in Persian a joiner is no part of a letter
])  # fmt: skip
def test_a_span_never_ends_inside_a_letter(text, letters):
    edges = [0, *np.cumsum(letters).tolist()]
    assert edges[-1] == len(text)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            first, last = max(e for e in edges if e <= start), min(e for e in edges if e >= stop)
            assert whole_letters(text, start, stop) == (first, last)


def test_text_without_a_fast_tokenizer_is_refused():
    collate = TokenClassificationCollator(0, 4, 150, special_token_ids=[0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="fast"):
        collate([{"text": ["a"], "labels": [0]}])


def test_a_packed_row_has_no_single_label():
    row = {"input_ids": [2, 9, 3, 2, 9, 3], "attention_mask": [1, 1, 1, 2, 2, 2], "label": 1}
    with pytest.raises(ValueError, match="row 0 packs 2 texts"):
        classifier()([row])


def test_an_unknown_problem_lists_the_known():
    with pytest.raises(ValueError, match="regression"):
        classifier(problem_type="classification")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_words_of_a_script_without_spaces_bring_no_space(kind):
    texts = ["我爱北京天安门", "北京大学在北京", "天安门上,太阳升", "the cat sat in Beijing"] * 40
    tokenizer = train_tokenizer(texts, 400 if kind == "bpe" else 60, kind=kind)
    collate = TokenClassificationCollator.from_tokenizer(tokenizer, max_sequence_length=64)
    rows = [
        {"text": words, "labels": list(range(len(words)))}
        for words in (
            list("北京大学"),
            ["我", "爱", "the", "cat", "北", "京", "，", "天"],
            ["the", "cat", "sat"],
        )
    ]
    made = collate.encode(rows)
    for row, one, running in zip(rows, made, ("北京大学", "我爱 the cat 北京，天", "the cat sat")):
        spelled = running if kind == "bpe" else unicodedata.normalize("NFKC", running)
        assert tokenizer.decode(one["input_ids"], skip_special_tokens=True) == spelled
        assert [label for label in one["labels"] if label != IGNORE_INDEX] == row["labels"]
        spaces = [
            id for id in one["input_ids"][2:] if tokenizer.convert_ids_to_tokens(id) in ("Ġ", "▁")
        ]
        assert len(spaces) <= running.count(" ")
    assert made[2]["input_ids"] == tokenizer("the cat sat").input_ids


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("words, running", [
    (["3", "月", "25", "日"], "3月25日"), (["约", "3.5", "亿", "元"], "约3.5亿元"), (["“", "北京", "”", "的"], "“北京”的"),
    (["北京", ",", "NBA", "球队", "，", "NBA"], "北京, NBA 球队，NBA"), (["the", "3", "cats", "在", "北京"], "the 3 cats 在北京"),
    (list("NBA球队2021年"), "NBA球队2021年"), (["เดือน", "25", "ปี"], "เดือน 25 ปี"), (list("ปี25"), "ปี25"),
])  # fmt: skip
def test_digits_and_signs_stand_beside_letters_of_chinese_and_latin_letters_where_all_is_spelled(
    kind, words, running
):
    alphabet = "3月25日约.亿元“北京”的,NBA球队，thecats在201年เดือนปี "
    tokenizer = train_tokenizer(
        [alphabet, *alphabet.split(), "北 京 the cats NBA"] * 40,
        400 if kind == "bpe" else 90,
        kind=kind,
    )
    collate = TokenClassificationCollator.from_tokenizer(tokenizer, max_sequence_length=64)
    made = collate.encode([{"text": words, "labels": list(range(len(words)))}])[0]
    spelled = running if kind == "bpe" else unicodedata.normalize("NFKC", running)
    assert tokenizer.decode(made["input_ids"], skip_special_tokens=True) == spelled
    assert [label for label in made["labels"] if label != IGNORE_INDEX] == list(range(len(words)))


@pytest.mark.parametrize("words, together", [
    ([], []), (["the", "3", "。"], [0, 0, 1]), (["3", "é"], [0, 0]), (["北", "", "3"], [0, 0, 0]), (["北", " ", "京"], [0, 0, 0]),
    (["，", "。"], [0, 1]), (["한", "3"], [0, 0]), (["か", "A"], [0, 1]), (["かな", "AB"], [0, 0]), (["我", "\u3000", "3"], [0, 1, 0]),
])  # fmt: skip
def test_what_stands_together(words, together):
    assert supervised._stand_together(words) == list(map(bool, together))


def test_words_of_a_script_without_spaces_are_read_by_wordpiece_as_ever():
    tokenizer = train_tokenizer(["北京大学在北京", "the cat sat"] * 9, 60)
    collate = TokenClassificationCollator.from_tokenizer(tokenizer, max_sequence_length=64)
    words = ["北", "京", "大学", "the", "cat", "在"]
    made = collate.encode([{"text": words, "labels": [1] * 6}])[0]
    assert made["input_ids"] == tokenizer(words, is_split_into_words=True).input_ids
