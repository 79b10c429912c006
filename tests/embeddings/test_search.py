"Search is exact, encoding goes on where it stopped, and an index answers to its own model alone."

import fcntl
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from embedding_cases import draw_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bi_encoder import draw_texts, make_model

from bertlab.data.documents import Document
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.embeddings.search import (
    SearchHit,
    TextIndex,
    mine_negatives,
    rerank,
    encode_corpus,
    exact_search,
    source_documents,
)
from bertlab.embeddings.pairs import PairDataset
from bertlab.embeddings.retrieval import BM25, bm25_scores, similarity_scorer
from bertlab.model.config import BertLabConfig
from bertlab.model.encoder import BertLabModel


def documents(count=50):
    return [Document(text, f"x:{n}") for n, text in enumerate(draw_texts(count))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30), st.integers(0, 99))
def test_search_by_blocks_is_a_sort_of_everything(count, top_k, block, seed):
    rng = np.random.default_rng(seed)
    vectors, queries = (
        rng.integers(-2, 3, (count, 3)).astype(np.float32),
        rng.integers(-2, 3, (4, 3)).astype(np.float32),
    )
    scores, numbers = exact_search(queries, vectors, top_k, block)
    exact = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(numbers, exact), "also where scores tie: the first one wins"
    assert np.array_equal(scores, np.take_along_axis(queries @ vectors.T, exact, 1))


class Stop(Exception):
    pass


def test_an_index_finds_its_own_texts_and_refuses_another_model(tmp_path):
    model, docs = make_model(), documents(30)
    encode_corpus(model, lambda: docs, tmp_path / "index", truncate_dim=16)
    index = TextIndex.open(tmp_path / "index")
    index.check_model(model)
    for n, hits in enumerate(index.search(model, [d.text for d in docs], 1)):
        assert hits[0].text == docs[n].text and hits[0].score == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="another model"):
        index.check_model(make_model("bert"))
    with pytest.raises(ValueError, match="not an index"):
        TextIndex.open(tmp_path)


PROMPTS = {"query": "alpha beta: ", "document": "gamma delta: "}


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_unnormalized_models_are_searched_correctly(tmp_path, name):
    model, docs = (
        make_model(normalize=False, st_config={"similarity_fn_name": name}),
        documents(30),
    )
    texts = [d.text for d in docs]
    encode_corpus(model, lambda: docs, tmp_path / "index", truncate_dim=16)
    index, full = TextIndex.open(tmp_path / "index"), model.encode(texts)
    assert np.ptp(np.linalg.norm(full, axis=1)) > 0.1, "or nothing is tested"
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True) if name == "cosine" else x  # noqa: E731
    expected = unit(full[:, :16]) @ unit(full[:, :16]).T
    for n, hits in enumerate(index.search(model, texts, 5)):
        assert np.allclose([hit.score for hit in hits], np.sort(expected[n])[::-1][:5], atol=1e-4)
        assert np.allclose(
            [hit.score for hit in hits], [expected[n, hit.number] for hit in hits], atol=1e-4
        )
    assert np.allclose(similarity_scorer(model)(texts, texts), unit(full) @ unit(full).T, atol=1e-4)


def test_reranking_sorts_hits_by_the_scores_of_pairs():
    hits = [
        SearchHit(0.9, "a", "x:1", 0),
        SearchHit(0.8, "bb", "x:2", 1),
        SearchHit(0.7, "c", "x:3", 2),
    ]
    best = rerank(lambda pairs: [len(text) for _, text in pairs], "query", hits, top_k=2)
    assert [(hit.number, hit.score) for hit in best] == [(1, 2.0), (0, 1.0)]


def test_mined_negatives_are_the_nearest_other_texts():
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    pairs, model = draw_pairs(24, negatives=1), make_model(st_config={"prompts": PROMPTS})
    mined = mine_negatives(pairs, model, num_negatives=2, verbose=False)
    assert (mined.queries, mined.positives) == (pairs.queries, pairs.positives)
    scores = similarity_scorer(model)(pairs.queries, pairs.positives)
    np.fill_diagonal(scores, -2)
    for number, negatives in enumerate(mined.negatives):
        nearest = [pairs.positives[n] for n in np.argsort(-scores[number])[:2]]
        assert negatives == pairs.negatives[number] + nearest


def test_copies_of_an_answer_are_no_negatives():
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    rows = [
        ("red house", "the red house"),
        ("Red house?", "north"),
        ("blue", "The red, house!"),
        ("green", "south"),
    ]
    pairs = PairDataset(*map(list, zip(*rows)), [[] for _ in rows])
    mined = mine_negatives(pairs, make_model(), num_negatives=3, verbose=False)
    assert mined.queries == pairs.queries
    assert mined.negatives[:3] == [["south"]] * 3 and set(mined.negatives[3]) == {
        "the red house",
        "north",
    }


def test_a_cross_encoder_chooses_negatives():
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    pairs = draw_pairs(12)
    right = {*zip(pairs.queries, pairs.positives)}
    scores = {
        (q, p): (len(p) % 7) / 8 + ((q, p) in right) for q in pairs.queries for p in pairs.positives
    }
    judge = SimpleNamespace(
        predict=lambda texts, **options: torch.tensor([scores[pair] for pair in texts])
    )
    mined = mine_negatives(pairs, make_model(), 2, judge, verbose=False)
    for query, positive, negatives in zip(mined.queries, mined.positives, mined.negatives):
        others = sorted((scores[query, p] for p in pairs.positives if p != positive), reverse=True)
        assert [scores[query, negative] for negative in negatives] == others[:2]
    with pytest.raises(ValueError, match="similarities"):
        mine_negatives(draw_pairs(4, scores=True), make_model())


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_a_hybrid_search_adds_scaled_scores(tmp_path, name):
    model = make_model(normalize=False, st_config={"similarity_fn_name": name})
    encode_corpus(model, documents, tmp_path / "index", part_size=20)
    index, queries = TextIndex.open(tmp_path / "index"), ["alpha beta", "unknown"]
    texts = [document.text for document in documents()]
    assert index.texts() == texts
    by_vectors, by_words = similarity_scorer(model)(queries, texts), bm25_scores(queries, texts)
    scale = lambda row: (row - row.min()) / (row.max() - row.min() or 1)
    expected = [scale(v) + 0.3 * scale(w) for v, w in zip(by_vectors, by_words)]
    for hits, scores in zip(index.search(model, queries, 5, BM25(texts)), expected):
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1][:5])
        assert [scores[hit.number] for hit in hits] == pytest.approx([hit.score for hit in hits])


BLANKS = [Document("", "a:1"), *documents(22), Document("  ", "a:8"), Document("three", "a:9")]


def read_output(path):
    "Return the vectors of an output, and the sources that it names."
    if path.suffix == ".npy":
        return np.load(path), None
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        return np.array(table["vector"].to_pylist()), table["source"].to_pylist()
    index = TextIndex.open(path)
    return index.vectors_ND, [index.read(n)[1] for n in range(len(index))]


def stop_at(limit):
    def watch(count):
        if count >= limit:
            raise Stop

    return watch


@pytest.mark.parametrize("output", ["v.npy", "v.parquet", "index"])
def test_a_continued_run_writes_the_same(tmp_path, output):
    model, notes, path = make_model(), Counter(), tmp_path / output
    for stop in (0, 10, 20):
        with pytest.raises(Stop):
            encode_corpus(model, lambda: BLANKS, path, part_size=10, progress=stop_at(stop))
        assert not path.exists()
    assert encode_corpus(model, lambda: BLANKS, path, part_size=10, notes=notes) == 23
    assert [*notes.values()] == [2] and not list(tmp_path.glob(".*.parts"))
    vectors, sources = read_output(path)
    texts = [document for document in BLANKS if output == "v.npy" or document.text.strip()]
    assert sources is None or sources == [document.source for document in texts]
    for vector, document in zip(vectors, texts, strict=True):
        is_blank = not document.text.strip()
        expected = np.zeros(32) if is_blank else model.encode([document.text])[0]
        assert np.abs(vector - expected).max() < 2e-6


def test_a_second_writer_of_an_output_is_refused(tmp_path):
    def watch(count):
        with open(tmp_path / ".x.parts/.lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    encode_corpus(make_model(), documents, tmp_path / "x", part_size=25, progress=watch)
    (tmp_path / ".y.parts").mkdir()
    with open(tmp_path / ".y.parts/.lock", "w") as file:  # as another process would hold it
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"at work in .*\.y\.parts"):
            encode_corpus(make_model(), documents, tmp_path / "y")


@pytest.mark.parametrize("change", ["model", "source", "truncate_dim", "texts"])
def test_a_stopped_run_refuses_changes(tmp_path, change):
    model, texts = make_model(), documents()
    with pytest.raises(Stop):
        encode_corpus(model, lambda: texts, tmp_path / "x", part_size=10, progress=stop_at(10))
    options = {"source": "another"} if change == "source" else {}
    options |= {"truncate_dim": 8} if change == "truncate_dim" else {}
    model = make_model("bert") if change == "model" else model
    texts = texts[1:] if change == "texts" else texts
    with pytest.raises(ValueError, match="stopped run"):
        encode_corpus(model, lambda: texts, tmp_path / "x", part_size=10, **options)


def test_a_model_is_recognized_by_its_vectors(tmp_path):
    model = make_model()
    encode_corpus(model, lambda: documents(5), tmp_path / "index")
    index = TextIndex.open(tmp_path / "index")
    again = BiEncoder.load(model.save(tmp_path / "model"))
    index.check_model(again)
    path = tmp_path / "model/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": None}))
    config = {**again.encoder.config.to_diff_dict(), "hidden_activation": "relu"}
    encoder = BertLabModel(BertLabConfig(**config))
    encoder.load_state_dict(again.encoder.state_dict())
    changed = [BiEncoder.load(tmp_path / "model"), make_model("bert")]
    changed.append(BiEncoder(encoder, model.tokenizer))
    for changed_model in changed:
        changed_model.max_sequence_length = model.max_sequence_length
        with pytest.raises(ValueError, match="another model.*vectors"):
            index.check_model(changed_model)


PROMPTS = {"query": "alpha beta: ", "document": "gamma delta: "}


def test_an_index_uses_both_prompts(tmp_path):
    model, plain, docs = make_model(st_config={"prompts": PROMPTS}), make_model(), documents(20)
    texts = [document.text for document in docs]
    encode_corpus(model, lambda: docs, tmp_path / "index")
    index = TextIndex.open(tmp_path / "index")
    expected = plain.encode([PROMPTS["document"] + text for text in texts])
    assert np.abs(index.vectors_ND - expected).max() < 2e-6
    scores = index.vectors_ND @ plain.encode([PROMPTS["query"] + "one two"])[0]
    (hits,) = index.search(model, ["one two"], 20)
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert np.allclose(similarity_scorer(model)(["one two"], texts)[0], scores, atol=1e-5)
    with pytest.raises(ValueError, match="document_prompt"):
        index.check_model(plain)
    index.prepare_model(plain)
    index.check_model(plain)


@pytest.mark.parametrize("name", ["v.txt", "old.npy", "full", "folder.npy"])
def test_a_taken_output_is_refused(tmp_path, name):
    (tmp_path / "old.npy").write_bytes(b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(ValueError, match=name):
        encode_corpus(make_model(), documents, tmp_path / name)
    if name == "old.npy":
        assert encode_corpus(make_model(), documents, tmp_path / name, overwrite=True) == 50


def test_texts_of_a_folder_have_their_sources(tmp_path):
    (tmp_path / "a.txt").write_text("first line\nsecond line\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "third"}))
    numbers = [(d.text, d.source) for d in source_documents([str(tmp_path)])()]
    assert numbers == [
        ("first line", "a.txt:1"),
        ("second line", "a.txt:2"),
        ("third", "b.jsonl:1"),
    ]
    with pytest.raises(ValueError, match="missing.txt"):
        source_documents([str(tmp_path / "missing.txt")])


MARKDOWN = """# Tools

## Hammers

They hit
nails.

```
# not a heading

def hit(): ...
```

Saws
====
They cut.

### Empty

## Rip saws

#### Teeth

Few.
"""
PAGE = """<html><head><title>Tools</title><style>p {color: red}</style></head><body><h2>Hammers</h2>
<p>They hit <b>nails</b> &amp; toes.<script>hit("<p>")</script><ul><li>one<li>two</ul>
<h2>Saws</h2><pre>cut(
    wood)</pre></body></html>"""


def test_headings_are_joined_to_their_sections(tmp_path):
    for name, text in (("a.md", MARKDOWN), ("b.html", PAGE), ("c.txt", "# one\n\ntwo\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.pdf").write_bytes(b"%PDF")
    notes = Counter()
    texts = {"a.md": [], "b.html": [], "c.txt": []}
    for document in source_documents([str(tmp_path)], notes)():
        texts[document.group].append(document.text)
    assert texts == {
        "a.md": [
            "# Tools\n## Hammers\nThey hit\nnails.",
            "# Tools\n## Hammers\n```\n# not a heading",
            "# Tools\n## Hammers\ndef hit(): ...\n```",
            "Saws\n====\nThey cut.",
            "Saws\n====\n### Empty\n## Rip saws\n#### Teeth\nFew.",
        ],
        "b.html": [
            "# Tools\n## Hammers\nThey hit nails & toes.",
            "# Tools\n## Hammers\n- one\n- two",
            "# Tools\n## Saws\ncut(\n   wood)",
        ],
        "c.txt": ["# one", "two"],
    }
    assert any("1 .pdf" in note for note in notes)
    full = source_documents(str(tmp_path / "b.html"), sample_by="document")()
    assert [document.text.count("##") for document in full] == [2]
