"Tasks hold no leak, measures are those worked out by hand, and baselines follow their formulas."

import math

import numpy as np
import pytest
from embedding_cases import WORDS
from test_bi_encoder import make_model

from bertlab.data.corpus import make_corpus
from bertlab.data.documents import Document
from bertlab.embeddings.module import retrieval_scores
from bertlab.embeddings.retrieval import (RETRIEVAL_TASKS, RetrievalTask, WordVectors, alignment, bm25_scores, bootstrap_ci, evaluate_retrieval,
                                      first_sentence, load_retrieval_task, mteb_scores, paired_differences, fuse_scores,
                                      reranked_scores, retrieval_table, signatures, similarity_scorer, tfidf_scores, uniformity)  # fmt: skip


@pytest.fixture(scope="module")
def corpus():
    rng, documents = np.random.default_rng(0), []
    for module in range(30):
        for n in range(8):
            head, body = (" ".join(rng.choice(WORDS, k)) for k in (5, 14))
            documents.append(
                Document(
                    f"{head} does {n}.\n\nIt is about {head.split()[0]}, and {body} of {module}.",
                    f"m{module}:f{n}",
                )
            )
    return make_corpus("small", documents, 0.2)


def test_training_and_test_share_no_module_and_no_text(corpus):
    task = load_retrieval_task("docstring", corpus)
    assert len(task.queries) > 20 and len(task.train) > 100
    assert not set(task.train.texts()) & set(task.queries + task.documents)
    modules = [
        {text.rpartition(" ")[2] for text in side}
        for side in (task.train.positives, task.documents)
    ]
    assert not modules[0] & modules[1]


@pytest.mark.parametrize("name", RETRIEVAL_TASKS)
def test_every_task_has_answers_and_training_pairs(name):
    task = load_retrieval_task(name)
    assert len(task.queries) > 30 and len(task.train) > 300
    assert all(answers and max(answers) < len(task.documents) for answers in task.relevant)
    assert not set(task.train.texts()) & set(task.queries + task.documents)
    scores = retrieval_scores(bm25_scores(task.queries, task.documents), task.relevant)
    by_chance = 10 / len(task.documents)
    assert scores["recall_10"].mean() > min(0.9, 5 * by_chance), "words in common must help"


def test_queries_and_documents_may_repeat():
    task = RetrievalTask.from_pairs("x", "y", [], [("a", "A"), ("a", "B"), ("b", "A"), ("a", "A")])
    assert (task.queries, task.documents, task.relevant) == (["a", "b"], ["A", "B"], [[0, 1], [0]])


def test_a_query_that_is_a_document_does_not_find_itself():
    chain = [
        ("a red fox", "a red fox runs"),
        ("a red fox runs", "the red fox runs home"),
        ("blue sea", "a deep blue sea"),
    ]
    task = RetrievalTask.from_pairs("x", "y", [], chain)
    assert task.find_itself() == [[], [0], []]
    scores = np.array([[3.0, 2, 1], [9, 2, 1], [1, 2, 3]])  # the second query is the first document
    outcomes = evaluate_retrieval(
        task, {"x": lambda queries, documents: scores, "TF-IDF": tfidf_scores}
    )
    assert all(
        values.tolist() == [1, 1, 1]
        for measures in outcomes.values()
        for values in measures.values()
    )
    knows_nothing = evaluate_retrieval(task, {"x": lambda queries, documents: np.zeros((3, 3))})[
        "x"
    ]["mrr"]
    assert knows_nothing.tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 3]), "it has one rival less"


def test_a_docstring_is_parted_after_itsfirst_sentence():
    text = "Return the name, e.g. a word.\n\nThe rest of it says considerably more than that first line does."
    query, body = first_sentence(text)
    assert (
        query.startswith("Return the name")
        and body.endswith("line does.")
        and query + " " + body == " ".join(text.split())
    )
    assert first_sentence("Short. no") is None


def test_signatures_are_those_of_documented_functions(tmp_path):
    path = tmp_path / "m.py"
    long = "Say what it does in a line that is long enough to count."
    path.write_text(
        f'class A:\n  def f(self, x: int = 3):\n    "{long}"\n  def g(self): pass\n  def __h__(self):\n    "{long}"\n'
    )
    assert list(signatures(path)) == [("f(self, x: int=3)", long)]
    path.write_text("def broken(:\n")
    assert list(signatures(path)) == []


def test_measures_of_two_answers_worked_out_by_hand():
    scores = np.array([[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2]])
    outcomes = {k: v[0] for k, v in retrieval_scores(scores, [[1, 4]]).items()}  # ranks 2 and 5
    ideal = 1 / math.log2(2) + 1 / math.log2(3)
    assert outcomes["recall_1"] == 0 and outcomes["recall_10"] == 1 and outcomes["mrr"] == 0.5
    assert outcomes["ndcg_10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(6)) / ideal)
    late = retrieval_scores(scores, [[0, 11]])  # ranks 1 and 12
    assert late["recall_10"][0] == 0.5 and late["recall_1"][0] == 1 and late["mrr"][0] == 1
    last = retrieval_scores(scores, [[10]])  # rank 11
    assert last["mrr"][0] == 1 / 11 and last["mrr_10"][0] == 0 and last["recall_100"][0] == 1


@pytest.mark.parametrize("width", [64, 384, 768])
def test_a_collapsed_model_scores_nothing(width):
    class Collapsed:
        def encode(self, texts):
            return np.tile(
                np.random.default_rng(0).normal(size=(1, width)).astype(np.float32), (len(texts), 1)
            )

    texts = ["x"] * 300
    scores = 20 * similarity_scorer(Collapsed())(texts, texts)  # on any scale
    outcomes = retrieval_scores(scores, [[n] for n in range(300)])
    assert all(values.max() <= 1 / 300 for values in outcomes.values())


def test_nan_ranks_last():
    scores = np.array([[np.nan, 1.0, 2.0], [0.5, np.nan, -np.inf], [9.0, 1.0, 2.0]])
    assert retrieval_scores(scores, [[0], [0], [2]])["mrr"].tolist() == pytest.approx(
        [1 / 3, 1, 1 / 2]
    )
    ranks = np.arange(5, 0, -1)[None] + 10**7  # whole numbers are exact, however large
    assert retrieval_scores(ranks, [[2]])["mrr"].tolist() == pytest.approx([1 / 3])


def test_bm25_is_its_formula():
    documents = ["red red blue", "green", "red four five six seven"]
    n, lengths = len(documents), [3, 1, 5]

    def expected(d, words, k1=1.5, b=0.75):  # noqa: E306
        total = 0.0
        for word in words:
            holders = sum(word in text.split() for text in documents)
            f = documents[d].split().count(word)
            idf = math.log(1 + (n - holders + 0.5) / (holders + 0.5))
            total += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * lengths[d] / 3))
        return total

    got = bm25_scores(["red blue", "green unknown"], documents)
    assert np.allclose(got[0], [expected(d, ["red", "blue"]) for d in range(3)])
    assert np.allclose(got[1], [expected(d, ["green"]) for d in range(3)])


def test_baselines_find_a_text_by_its_words(corpus):
    texts = corpus.train_texts[:60]
    for scorer in (bm25_scores, tfidf_scores, WordVectors(corpus.train_texts, 16)):
        scores = scorer([*texts[:5], "zzz qqq"], texts)
        assert scores.shape == (6, 60) and np.isfinite(scores).all()
        assert scores[:5].argmax(1).tolist() == [0, 1, 2, 3, 4]


def test_fused_scores_have_no_unit():
    scores, words = (
        np.array([[3.0, 2, 1, 0], [1, 1, 1, 1]]),
        np.array([[0.0, 0, 5, 0], [0, 2, 1, 0]]),
    )
    fused = [[1, 2 / 3, 1 / 3 + 0.5, 0], [0, 0.5, 0.25, 0]]  # equal scores tell nothing
    assert fuse_scores(scores, words, 0.5) == pytest.approx(np.array(fused))
    assert fuse_scores(0.1 * scores + 7, 100 * words, 0.5) == pytest.approx(np.array(fused))


def test_a_reranker_moves_the_best():
    scores, asked = [np.array([[3.0, 2, 1, 0]])], []

    def score(pairs):
        asked.extend(pairs)
        return [{"a": 0, "b": 7, "c": 9, "d": 9}[text] for _, text in pairs]

    assert reranked_scores(score, ["q"], [*"abcd"], scores[0], 2).tolist() == [[-2, -1, -3, -4]]
    assert asked == [("q", "a"), ("q", "b")]
    assert reranked_scores(score, ["q"], [*"abcd"], scores[0]).tolist() == [[-4, -3, -2, -2]]


def test_an_interval_contains_its_mean_and_that_of_a_difference_is_narrow():
    hard = np.random.default_rng(0).random(50)
    results = {"a": {"mrr": hard + 0.01 * (np.arange(50) % 3)}, "b": {"mrr": hard}}
    mean, low, high = bootstrap_ci(hard)
    assert low < mean < high
    [(name, values)] = paired_differences(results, "b").items()
    assert name == "a - b" and bootstrap_ci(values["mrr"])[1] > 0 > low - mean
    assert "0.010 (0.0" in retrieval_table({name: values}, ["mrr"])


def test_alignment_and_uniformity_tell_a_collapse_from_a_sphere():
    same = np.ones((20, 4)) / 2
    assert alignment(same, same) == 0 and uniformity(same) == 0
    circle = np.array([[1.0, 0], [-1, 0]])
    assert uniformity(circle) == pytest.approx(-8) and alignment(circle, -circle) == 4


def test_a_table_has_a_line_for_each_scorer(corpus):
    task = load_retrieval_task("docstring", corpus)

    class Model:
        def encode(self, texts):
            return np.random.default_rng(0).normal(size=(len(texts), 4))

    table = retrieval_table(
        evaluate_retrieval(task, {"random": similarity_scorer(Model()), "BM25": bm25_scores})
    )
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["random", "BM25"]
    with pytest.raises(ValueError, match="docstring"):
        load_retrieval_task("dcstring", corpus)


@pytest.fixture(scope="module")
def own_task(corpus):
    "The small corpus' docstrings as a task of mteb, whose data set needs no hub."
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval

    task = load_retrieval_task("docstring", corpus)

    class SmallDocstrings(AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="SmallDocstrings", description="first sentences find the rest", type="Retrieval", eval_langs=["eng-Latn"],
            main_score="ndcg_at_10", dataset={"path": "none", "revision": "1"})  # fmt: skip

        def load_data(self, *args, **kwargs):
            if self.data_loaded:
                return
            ids = lambda texts, word: Dataset.from_list(
                [{"id": f"{word}{i}", "text": text} for i, text in enumerate(texts)]
            )
            outcomes = {
                f"q{q}": {f"d{d}": 1 for d in relevant} for q, relevant in enumerate(task.relevant)
            }
            self.dataset = {"default": {"test": {"corpus": ids(task.documents, "d"), "queries": ids(task.queries, "q"),
                                                 "relevant_docs": outcomes, "top_ranked": None}}}  # fmt: skip
            self.data_loaded = True

    return task, SmallDocstrings()


def test_mteb_agrees_with_our_scores(own_task, tmp_path):
    task, mteb_task = own_task
    model = make_model()
    model.save(tmp_path)
    own_mrr = retrieval_scores(
        similarity_scorer(model)(task.queries, task.documents), task.relevant
    )["ndcg_10"].mean()
    assert 0 < own_mrr < 1
    assert mteb_scores(tmp_path, [mteb_task]) == {
        "SmallDocstrings": pytest.approx(own_mrr, abs=1e-4)
    }
