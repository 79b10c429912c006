"Entities as seqeval counts them, answers as SQuAD's script does, and the table of tasks."

import math
import re
import string
import unicodedata
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seq
from seqeval.scheme import IOB2
from ranks import run_on_ranks

from bertlab.finetuning.metrics import (
    AnswerScore,
    EntityScore,
    get_metrics_for_task,
    normalize_answer,
    score_answer,
    score_entities,
)

NAMES = ["B-LOC", "I-LOC", "O", "B-PER", "I-PER"]
MODES = {"lenient": {}, "strict": {"mode": "strict", "scheme": IOB2}}


def ids_of(*sentences: str, length: int = 0) -> torch.Tensor:
    "Sentences of label names, filled up with -100."
    rows = [[NAMES.index(name) for name in sentence.split()] for sentence in sentences]
    width = max(length, *map(len, rows))
    return torch.tensor([row + [-100] * (width - len(row)) for row in rows])


def seqeval_scores(true, predicted, mode) -> dict[str, float]:
    options = {**MODES[mode], "zero_division": 0}
    return {
        "entity_precision": seq.precision_score(true, predicted, **options),
        "entity_recall": seq.recall_score(true, predicted, **options),
        "entity_f1": seq.f1_score(true, predicted, **options),
        "entity_f1_macro": seq.f1_score(true, predicted, average="macro", **options),
    }


def values_of(metrics) -> dict[str, float]:
    return {name: metric.compute().item() for name, metric in metrics.items()}


sentence = st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=12)


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(sentence, min_size=1, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=60)
@pytest.mark.filterwarnings("ignore")  # seqeval warns where nothing is found
def test_entity_scores_are_seqevals(mode, sentences):
    true, predicted = ([[NAMES[pair[i]] for pair in row] for row in sentences] for i in (0, 1))
    if not any(name != "O" for row in true + predicted for name in row):
        return  # seqeval has no answer where there is no entity at all
    if mode == "strict" and not any(name[0] == "B" for row in true + predicted for name in row):
        return
    width = max(map(len, true))
    preds = ids_of(*map(" ".join, predicted), length=width).clamp_min(0)
    metrics = score_entities(NAMES, mode)
    for metric in metrics.values():
        metric.update(preds, ids_of(*map(" ".join, true), length=width))
    assert values_of(metrics) == pytest.approx(seqeval_scores(true, predicted, mode), abs=1e-6)


# Worked by hand: (true, predicted, entities that agree, predicted, true) in lenient and in strict mode.
CASES = {
    "the end differs": ("B-PER I-PER O", "B-PER O O", (0, 1, 1), (0, 1, 1)),
    "an I that nothing began": ("O B-PER I-PER", "O I-PER I-PER", (1, 1, 1), (0, 0, 1)),
    "the type changes inside": ("B-PER I-LOC O", "B-PER O O", (1, 1, 2), (1, 1, 1)),
    "two in a row": ("B-PER B-PER I-PER", "B-PER B-PER I-PER", (2, 2, 2), (2, 2, 2)),
    "two in a row read as one": ("B-PER B-PER O", "B-PER I-PER O", (0, 1, 2), (0, 1, 2)),
    "up to the last word": ("O O B-LOC", "O O B-LOC", (1, 1, 1), (1, 1, 1)),
    "the type differs": ("B-LOC I-LOC", "B-PER I-PER", (0, 1, 1), (0, 1, 1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_entities_counted_by_hand(case, mode):
    true, predicted, *counts = CASES[case]
    metric = EntityScore(NAMES, mode=mode)
    metric.update(ids_of(predicted), ids_of(true))
    assert tuple(metric.counts_3T.sum(1).tolist()) == counts[list(MODES).index(mode)]


def test_pieces_of_words_and_padding_are_as_if_absent():
    # "[CLS] Ang ##ela Mer ##kel in Ber ##lin [SEP] [PAD]": only a word's first piece has a label.
    target = torch.tensor([[-100, 3, -100, 4, -100, 2, 0, -100, -100, -100]])
    preds = torch.tensor([[3, 3, 0, 4, 2, 2, 0, 0, 1, 1]])  # nonsense at each ignored place
    metrics = score_entities(NAMES)
    for metric in metrics.values():
        metric.update(preds, target)
    assert set(values_of(metrics).values()) == {1.0}
    # Two names, not three: the piece in the middle does not cut "Angela Merkel" in half.
    assert metrics["entity_f1"].counts_3T.sum(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_cutting_words_into_pieces_changes_no_count(mode):
    draw = torch.Generator().manual_seed(0)
    true, predicted = torch.randint(5, (2, 20, 9), generator=draw)
    whole, pieces = EntityScore(NAMES, mode=mode), EntityScore(NAMES, mode=mode)
    whole.update(predicted, true)
    cut_true, cut_predicted = torch.full((20, 30), -100), torch.randint(5, (20, 30), generator=draw)
    for row in range(20):
        places = torch.randperm(30, generator=draw)[:9].sort().values
        cut_true[row, places], cut_predicted[row, places] = true[row], predicted[row]
    pieces.update(cut_predicted, cut_true)
    assert torch.equal(pieces.counts_3T, whole.counts_3T) and whole.counts_3T[0].sum() > 10


def test_an_entity_does_not_cross_into_the_next_sentence():
    metric = EntityScore(NAMES)
    metric.update(ids_of("O B-PER", "I-PER O"), ids_of("O B-PER", "I-PER O"))
    assert metric.counts_3T.sum(1).tolist() == [2, 2, 2]


def test_labels_without_a_type_and_types_with_a_dash():
    metric = EntityScore(["O", "B", "I", "B-a-b", "I-a-b"])
    assert metric.types == ["_", "a-b"]
    metric.update(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 4]]))
    assert metric.counts_3T.tolist() == [[1, 1]] * 3


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_entity_scores_of_nothing_are_0():
    for batch in ([], [(torch.empty(0, 4, 5), torch.empty(0, 4, dtype=torch.int64))],
                  [(torch.empty(2, 0, 5), torch.empty(2, 0, dtype=torch.int64))],
                  [(torch.randn(2, 3, 5), torch.full((2, 3), -100))], [(ids_of("O O"), ids_of("O O"))]):  # fmt: skip
        metrics = score_entities(NAMES)
        for metric in metrics.values():
            for pair in batch:
                metric.update(*pair)
        assert set(values_of(metrics).values()) == {0.0}


# SQuAD's rules, written from the paper and the script's description, by other means than the module's.
PUNCTUATION = re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def squad_words(text: str) -> list[str]:
    words = re.findall(r"\w+|\W", re.sub(f"[{PUNCTUATION}]", "", text.lower()))
    return "".join(" " if word in {"a", "an", "the"} else word for word in words).split()


def squad_scores(answer: str, golds: list[str]) -> tuple[float, float]:
    "Exact match and F1 of one question."
    golds = [gold for gold in golds if squad_words(gold)] or [""]
    exact, overlap = 0.0, 0.0
    for gold in golds:
        ours, theirs = squad_words(answer), squad_words(gold)
        exact = max(exact, float(ours == theirs))
        if not ours or not theirs:
            overlap = max(overlap, float(ours == theirs))
            continue
        left, same = list(theirs), 0
        for word in ours:
            if word in left:
                left.remove(word)
                same += 1
        if same:
            precision, recall = same / len(ours), same / len(theirs)
            overlap = max(overlap, 2 * precision * recall / (precision + recall))
    return exact, overlap


ANSWERS = [  # answer, gold ones, exact match, F1; worked by hand
    ("The Eiffel Tower!", ["Eiffel Tower"], 1, 1),
    ("eiffel   tower in Paris", ["Eiffel Tower"], 0, 2 * 2 / (4 + 2)),
    ("in 1889", ["1889", "the year 1889", "March 1889"], 0, 2 * 1 / (2 + 1)),
    (
        "to be or not to be",
        ["to be to be to be"],
        0,
        2 * 4 / (6 + 6),
    ),  # "to" and "be" count twice each
    ("", [], 1, 1),  # SQuAD 2.0: unanswerable, and nothing was answered
    ("Paris", [], 0, 0),
    ("", ["Paris"], 0, 0),
    ("the", ["Paris"], 0, 0),  # nothing is left of the answer
    ("Paris", ["the", "Paris"], 1, 1),  # a gold answer of nothing but an article is none
    ("a theatre", ["theatre"], 1, 1),  # "the" within a word stays
    ("U.S.A", ["USA"], 1, 1),
    ("well-known", ["well known"], 0, 0),  # punctuation goes without leaving a space
    ("an é", ["É"], 1, 1),
]


@pytest.mark.parametrize("answer, golds, exact, overlap", ANSWERS)
def test_answers_by_hand(answer, golds, exact, overlap):
    for score, expected in (("exact_match", exact), ("f1", overlap)):
        metric = AnswerScore(score)
        metric.update([answer], [golds])
        assert metric.compute().item() == pytest.approx(expected)
    assert squad_scores(answer, golds) == pytest.approx((exact, overlap))


text = st.text(alphabet="ab the.,-'ÀN\n ", max_size=20)


@given(text, st.lists(text, max_size=3))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_answers_are_scored_as_squads_rules_say(answer, golds):
    assert normalize_answer(answer).split() == squad_words(answer)
    for score, expected in zip(("exact_match", "f1"), squad_scores(answer, golds)):
        metric = AnswerScore(score)
        metric.update([answer], [golds])
        assert metric.compute().item() == pytest.approx(expected)


@given(
    *[
        st.text(
            alphabet=st.one_of(st.characters(max_codepoint=127), st.sampled_from("a the,.-'")),
            max_size=20,
        )
    ]
    * 2
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_answers_in_ascii_score_as_by_the_formula_of_squads_script(answer, gold):
    def words(text):
        bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", bare).split()

    ours, theirs = words(answer), words(gold)
    same = (Counter(ours) & Counter(theirs)).total()
    overlap = 2 * same / (len(ours) + len(theirs)) if ours and theirs else float(ours == theirs)
    assert normalize_answer(answer) == " ".join(ours)
    assert score_answer(answer, [gold], "exact_match") == float(ours == theirs)
    assert score_answer(answer, [gold]) == overlap


@given(*[st.text(alphabet="北京市1b9 ,。《》、·(", max_size=12)] * 2)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_answers_in_chinese_score_as_mlqas_script_has_it(answer, gold):
    "Punctuation of category P goes; an ideograph is a token, and what stands between ideographs is cut at spaces."

    def tokens(text):  # noqa: E306
        bare = "".join(c for c in text.lower() if not unicodedata.category(c).startswith("P"))
        return "".join(f" {c} " if "\u4e00" <= c <= "\u9fa5" else c for c in bare).split()

    ours, theirs = tokens(answer), tokens(gold)
    assert score_answer(answer, [gold], "exact_match") == float(ours == theirs)
    same = (Counter(ours) & Counter(theirs)).total()
    assert score_answer(answer, [gold]) == pytest.approx(
        2 * same / (len(ours) + len(theirs)) if ours and theirs else float(ours == theirs)
    )


@pytest.mark.parametrize("answer, gold, exact, overlap", [
    ("北京市朝阳区", "北京市朝阳", 0, 2 * 5 / (6 + 5)),
    ("《红楼梦》", "红楼梦。", 1, 1),
    ("القاهرة،", "القاهرة", 1, 1),
    ("दिल्ली।", "दिल्ली", 1, 1),
    ("น้ำ", "นำ", 0, 2 * 1 / (2 + 2)),  # a letter with another mark is another letter; sara am is the same
    ("thành phố à", "thành phố á", 0, 2 * 2 / (3 + 3)),
    ("x a̱", "x the̱", 0, 2 * 1 / (2 + 2)),  # no composed form: the mark makes them no articles
    ("a x̄", "x̄", 1, 1),
    ("“Paris”", "Paris", 1, 1),
])  # fmt: skip
def test_answers_of_other_scripts_by_hand_however_accents_are_stored(answer, gold, exact, overlap):
    for form in ("NFC", "NFD"):
        said = unicodedata.normalize(form, answer)
        assert score_answer(said, [gold], "exact_match") == exact, form
        assert score_answer(said, [gold]) == pytest.approx(overlap), form


def test_answer_scores_are_torchmetrics_squad_on_recorded_predictions():
    from torchmetrics.text import SQuAD

    answerable = [(answer, golds) for answer, golds, *_ in ANSWERS if golds and "the" not in golds]
    theirs = SQuAD()
    theirs.update([{"prediction_text": answer, "id": str(i)} for i, (answer, _) in enumerate(answerable)],
                  [{"answers": {"text": golds, "answer_start": [0] * len(golds)}, "id": str(i)}
                   for i, (_, golds) in enumerate(answerable)])  # fmt: skip
    expected = theirs.compute()
    for score, metric in get_metrics_for_task("question_answering").items():
        metric.update(
            [answer for answer, _ in answerable], [{"text": golds} for _, golds in answerable]
        )
        assert 100 * metric.compute().item() == pytest.approx(expected[score].item(), rel=1e-5)


def test_the_mean_is_over_questions_not_over_batches():
    metric = AnswerScore("exact_match")
    metric.update(["x"], [["x"]])
    metric.update([], [])
    metric.update(["x", "x", "x"], [["y"], ["y"], ["y"]])
    assert metric.compute() == 0.25


def test_two_empty_answers_agree_and_an_empty_one_with_a_full_one_does_not():
    assert score_answer("", ["the"]) == 1 and score_answer("", ["x"]) == 0 == score_answer(
        "x", [""]
    )


def shards() -> dict[str, tuple[dict, list]]:
    "Task -> options, and batches of unequal size; rank 0 gets all but the last, rank 1 the last."
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 1, 9)
    labels = [
        (torch.randn(n, 4, generator=draw), torch.randint(4, (n,), generator=draw)) for n in sizes
    ]
    tokens = [
        (torch.randn(n, 6, 5, generator=draw), torch.randint(5, (n, 6), generator=draw))
        for n in sizes
    ]
    for _, target in tokens:
        target[:, 4] = -100
    decisions = [
        (torch.randn(n, 3, generator=draw), torch.randint(2, (n, 3), generator=draw)) for n in sizes
    ]
    values = [(torch.randn(n, generator=draw), torch.randn(n, generator=draw)) for n in sizes]
    answers = [(["a b", "c"], [["b"], ["c", "d"]]), (["x"], [[]]), (["b a c"], [["c b"]])]
    return {
        "labels": ({"task": "classification", "num_labels": 4}, labels),
        "tokens": ({"task": "token_classification", "num_labels": 5, "label_names": NAMES}, tokens),
        "decisions": ({"task": "classification", "num_labels": 3,
                       "problem_type": "multi_label_classification"}, decisions),
        "values": ({"task": "classification", "num_labels": 1, "problem_type": "regression"}, values),
        "answers": ({"task": "question_answering"}, answers),
    }  # fmt: skip


def compute_all(choose) -> dict[str, dict[str, float]]:
    "All scores after the batches that `choose` takes."
    found = {}
    for name, (options, batches) in shards().items():
        metrics = get_metrics_for_task(**options)
        for metric in metrics.values():
            for batch in choose(batches):
                metric.update(*batch)
        found[name] = values_of(metrics)
    return found


def on_one_rank(folder: str) -> None:
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")  # torchmetrics warns on a rank that got nothing
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    uneven = compute_all(lambda batches: batches[:2] if rank == 0 else batches[2:])
    empty_rank = compute_all(lambda batches: batches if rank == 0 else [])
    torch.save([uneven, empty_rank], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_two_processes_with_uneven_shards_score_like_one(tmp_path):
    run_on_ranks(on_one_rank, str(tmp_path))
    expected = compute_all(lambda batches: batches)
    for rank in (0, 1):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, abs=1e-6), (rank, name)


def test_each_task_has_its_metrics():
    labels = ["accuracy", "f1_macro", "f1_micro", "precision_macro", "recall_macro", "mcc"]
    entities = ["entity_precision", "entity_recall", "entity_f1", "entity_f1_macro"]
    assert list(get_metrics_for_task("classification")) == labels
    multi = get_metrics_for_task("classification", 3, problem_type="multi_label_classification")
    assert list(multi) == labels
    assert list(get_metrics_for_task("token_classification", 9)) == labels
    assert (
        list(get_metrics_for_task("token_classification", 5, label_names=NAMES))
        == labels + entities
    )
    assert list(get_metrics_for_task("question_answering")) == ["exact_match", "f1"]
    regression = get_metrics_for_task("classification", 1, problem_type="regression")
    assert list(regression) == ["pearson", "spearman"]


def test_metrics_do_not_share_their_counts():
    one, two = (
        get_metrics_for_task("token_classification", 5, label_names=NAMES),
        get_metrics_for_task("classification", 5),
    )
    one["entity_f1"].update(ids_of("B-PER"), ids_of("B-PER"))
    assert one["entity_recall"].counts_3T.sum() == 0
    one["accuracy"].update(torch.tensor([1]), torch.tensor([1]))
    assert two["accuracy"].metric.update_count == 0


def test_forward_answers_for_the_batch_and_a_reset_forgets():
    metric = EntityScore(NAMES)
    assert metric(ids_of("B-PER O"), ids_of("B-PER O")) == 1
    assert metric(ids_of("B-PER O"), ids_of("O B-PER")) == 0
    assert metric.compute() == 0.5
    metric.reset()
    assert metric.counts_3T.sum() == 0


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"task": "ner"},
            "task='ner' is unknown.*classification, token_classification, question_answering",
        ),
        (
            {"task": "classification", "num_labels": 1},
            "num_labels must be 2 or more, got 1.*regression",
        ),
        ({"task": "token_classification", "num_labels": 0}, "num_labels must be 2 or more"),
        (
            {"task": "classification", "problem_type": "regresion"},
            "problem_type='regresion' is unknown; did you mean 'regression'",
        ),
        (
            {"task": "classification", "problem_type": "regression"},
            "num_labels must be 1 for regression",
        ),
        (
            {
                "task": "classification",
                "num_labels": 1,
                "problem_type": "multi_label_classification",
            },
            "2 or more",
        ),
        (
            {"task": "token_classification", "num_labels": 5, "problem_type": "regression"},
            "problem_type='regression'",
        ),
        (
            {"task": "token_classification", "num_labels": 4, "label_names": NAMES},
            "name 5 labels, but num_labels=4",
        ),
        (
            {"task": "classification", "num_labels": 5, "label_names": NAMES},
            "label_names belong to token",
        ),
        (
            {"task": "token_classification", "num_labels": 2, "label_names": ["O", "PER"]},
            "IOB2.*'PER'",
        ),
        (
            {"task": "token_classification", "num_labels": 2, "label_names": ["O", "O"]},
            "no entity type",
        ),
        ({"task": "token_classification", "num_labels": 2, "label_names": "OB"}, "must be a list"),
        (
            {
                "task": "token_classification",
                "num_labels": 5,
                "label_names": NAMES,
                "entity_mode": "lax",
            },
            "mode='lax'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_answered(options, words):
    with pytest.raises(ValueError, match=words):
        get_metrics_for_task(**options)


def test_answers_that_are_not_lists_are_answered():
    for preds, target, words in (("Paris", [["Paris"]], "preds must be a list"), (["x"], [], "one text for each"),
                                 (["x"], ["x"], "list of gold answers")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            AnswerScore().update(preds, target)
    with pytest.raises(ValueError, match="score='bleu' is unknown; choose one of exact_match, f1"):
        AnswerScore("bleu")


def test_labels_beyond_the_names_are_answered():
    with pytest.raises(ValueError, match="target must lie in 0 ... 4"):
        EntityScore(NAMES).update(torch.tensor([[0, 1]]), torch.tensor([[0, 5]]))
    assert math.isclose(EntityScore(NAMES).counts_3T.sum(), 0)
