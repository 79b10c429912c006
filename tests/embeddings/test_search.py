"Search is exact, encoding goes on where it stopped, and an index answers to its own model alone."

import json
from collections import Counter

import numpy as np
import pytest
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
    model_fingerprint,
    exact_search,
    source_documents,
)
from bertlab.embeddings.retrieval import similarity_scorer
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
    scores, found = exact_search(queries, vectors, top_k, block)
    exact = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(found, exact), "also where scores tie: the first one wins"
    assert np.array_equal(scores, np.take_along_axis(queries @ vectors.T, exact, 1))


class Stop(Exception):
    pass


@pytest.mark.parametrize("output", ["v.npy", "v.parquet", "index"])
def test_a_continued_run_writes_the_same(tmp_path, output):
    model, docs, read = make_model(), documents(), []
    expected = model.encode([d.text for d in docs])

    def source():
        for document in docs:
            read.append(document)
            yield document

    for stop in (0, 10, 20, 40):

        def watch(count, stop=stop):
            if count >= stop:
                raise Stop

        with pytest.raises(Stop):
            encode_corpus(model, source, tmp_path / output, part_size=10, progress=watch)
        assert not (tmp_path / output).exists()
    assert encode_corpus(model, source, tmp_path / output, part_size=10) == 50
    if output == "v.npy":
        found = np.load(tmp_path / output)
    elif output == "v.parquet":
        from pyarrow import parquet

        table = parquet.read_table(tmp_path / output)
        assert (
            table["text"].to_pylist() == [d.text for d in docs]
            and table["source"][3].as_py() == "x:3"
        )
        found = np.array(table["vector"].to_pylist())
    else:
        index = TextIndex.open(tmp_path / output)
        assert [index.read(n)[0] for n in (0, 11, 49)] == [docs[n].text for n in (0, 11, 49)]
        found = np.asarray(index.vectors_ND)
    assert np.abs(found - expected).max() < 2e-6
    assert not list(tmp_path.glob(".*.parts"))


def stopped_model(output):
    "A model whose encoding of the documents was stopped after a part."
    model = make_model()

    def stop(count):
        if count:
            raise Stop

    with pytest.raises(Stop):
        encode_corpus(model, documents, output, part_size=10, progress=stop)
    return model


def test_a_stopped_run_needs_the_same_options(tmp_path):
    model = stopped_model(tmp_path / "v.npy")
    other = make_model(pooling="cls")
    assert model_fingerprint(other) != model_fingerprint(model) == model_fingerprint(make_model())
    for wrong, options in ((other, {}), (model, {"source": "else"}), (model, {"truncate_dim": 8})):
        with pytest.raises(ValueError, match="stopped"):
            encode_corpus(wrong, documents, tmp_path / "v.npy", **{"part_size": 10, **options})


def test_a_stopped_run_needs_the_same_texts(tmp_path):
    model, path = make_model(), tmp_path / "texts.txt"
    path.write_text("one two\nthree four\n\nfive six\nseven\n")

    def stop(count):
        if count >= 2:
            raise Stop

    def encode(sample_by, progress=lambda count: None):
        read = source_documents([str(path)], sample_by=sample_by)
        return encode_corpus(model, read, tmp_path / "index", part_size=2, progress=progress)

    with pytest.raises(Stop):
        encode("line", stop)
    with pytest.raises(
        ValueError, match=r"text 1 .* was 'one two' \(texts.txt:1\) and is 'one two\\nthree four'"
    ):
        encode("paragraph")
    path.write_text("one two\n")
    with pytest.raises(ValueError, match=r"text 2 .* was 'three four' .*the end"):
        encode("line")
    path.write_text("one two\nthree four\nfive\n")  # what follows may change: it is not encoded yet
    assert encode("line") == 3
    index = TextIndex.open(tmp_path / "index")
    assert [index.read(n) for n in range(3)] == [
        (t, f"texts.txt:{n}") for n, t in enumerate(["one two", "three four", "five"], 1)
    ]


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


def test_an_index_uses_both_prompts(tmp_path):
    model, plain, docs = make_model(st_config={"prompts": PROMPTS}), make_model(), documents(20)
    encode_corpus(model, lambda: docs, tmp_path / "index")
    index = TextIndex.open(tmp_path / "index")
    texts = [d.text for d in docs]
    assert (
        np.abs(
            index.vectors_ND - plain.encode([PROMPTS["document"] + text for text in texts])
        ).max()
        < 2e-6
    )
    (hits,) = index.search(model, ["one two"], 20)
    asked = plain.encode([PROMPTS["query"] + "one two"])[0]
    assert np.allclose(
        [hit.score for hit in hits],
        [index.vectors_ND[hit.number] @ asked for hit in hits],
        atol=1e-5,
    )
    assert np.allclose(
        similarity_scorer(model)(["one two"], texts)[0], index.vectors_ND @ asked, atol=1e-5
    )
    for other in (plain, make_model(st_config={"prompts": {"passage": "no: "}})):
        with pytest.raises(ValueError, match="document_prompt"):
            index.check_model(other)
        index.prepare_model(other)
        index.check_model(other)


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_unnormalized_models_are_searched_correctly(tmp_path, name):
    model, docs = (
        make_model(normalize=False, st_config={"similarity_fn_name": name}),
        documents(30),
    )
    texts = [d.text for d in docs]
    encode_corpus(model, lambda: docs, tmp_path / "index", truncate_dim=16)
    index, whole = TextIndex.open(tmp_path / "index"), model.encode(texts)
    assert np.ptp(np.linalg.norm(whole, axis=1)) > 0.1, "or nothing is tested"
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True) if name == "cosine" else x  # noqa: E731
    expected = unit(whole[:, :16]) @ unit(whole[:, :16]).T
    for n, hits in enumerate(index.search(model, texts, 5)):
        assert np.allclose([hit.score for hit in hits], np.sort(expected[n])[::-1][:5], atol=1e-4)
        assert np.allclose(
            [hit.score for hit in hits], [expected[n, hit.number] for hit in hits], atol=1e-4
        )
    assert np.allclose(
        similarity_scorer(model)(texts, texts), unit(whole) @ unit(whole).T, atol=1e-4
    )


def test_a_fingerprint_is_that_of_whoever_gives_the_same_vectors(tmp_path):
    for kind in ("modernbert", "bert"):
        model = make_model(kind)
        again = BiEncoder.load(model.save(tmp_path / kind))
        assert (
            model_fingerprint(model)
            == model_fingerprint(again)
            == model_fingerprint(BiEncoder.load(again.save(tmp_path / "again")))
        )
        kept = again.encoder.config.to_diff_dict()
        for name, value in (
            ("norm_eps", 1e-2),
            ("hidden_activation", "relu"),
            ("num_attention_heads", 4),
        ):
            encoder = BertLabModel(BertLabConfig(**{**kept, name: value}))
            encoder.load_state_dict(again.encoder.state_dict())
            other = BiEncoder(
                encoder, again.tokenizer, max_sequence_length=again.max_sequence_length
            )
            assert model_fingerprint(other) != model_fingerprint(again), name


def test_a_fingerprint_knows_what_the_tokenizer_makes_of_a_text(tmp_path):
    model = make_model()
    model.save(tmp_path / "model")
    path = tmp_path / "model/tokenizer.json"
    state = json.loads(path.read_text())
    for changed in ({"normalizer": None}, {"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": {"type": "WhitespaceSplit"}},
                    {"post_processor": None}):  # fmt: skip
        path.write_text(json.dumps({**state, **changed}))
        assert model_fingerprint(BiEncoder.load(tmp_path / "model")) != model_fingerprint(model), (
            changed
        )


SOME = [Document("", "a:1"), *(Document(f"one two {n}", f"a:{n}") for n in range(2, 8)), Document("  ", "a:8"),
        Document("three", "a:9"), Document("\n", "a:10")]  # fmt: skip


@pytest.mark.parametrize("output", ["v.npy", "v.parquet", "index"])
def test_blank_texts_are_zeros_or_left_out(tmp_path, output):
    model, notes = make_model(), Counter()
    assert encode_corpus(model, lambda: SOME, tmp_path / output, notes=notes) == 7
    assert sum(notes.values()) == 3 and all("blank texts" in what for what in notes)
    if output == "v.npy":
        found = np.load(tmp_path / output)
        assert len(found) == len(SOME) and "zeros" in [*notes][0]
        for row, document in zip(found, SOME):
            expected = (
                model.encode([document.text])[0]
                if document.text.strip()
                else np.zeros(model.embedding_dim)
            )
            assert np.abs(row - expected).max() < 2e-6
    elif output == "v.parquet":
        from pyarrow import parquet

        assert parquet.read_table(tmp_path / output)["source"].to_pylist() == [
            f"a:{n}" for n in (2, 3, 4, 5, 6, 7, 9)
        ]
    else:
        assert [TextIndex.open(tmp_path / output).read(n)[1] for n in (0, 6)] == ["a:2", "a:9"]


def test_an_output_that_cannot_be_is_refused_before_any_work(tmp_path):
    model = make_model()
    (tmp_path / "old.npy").write_bytes(b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    (tmp_path / "folder.npy").mkdir()
    for name, word in (
        ("v.txt", "must end"),
        ("old.npy", "exists"),
        ("full", "empty directory"),
        ("folder.npy", "is a directory"),
    ):
        with pytest.raises(ValueError, match=word):
            encode_corpus(model, documents, tmp_path / name)
    assert encode_corpus(model, documents, tmp_path / "old.npy", overwrite=True) == 50
    with pytest.raises(ValueError, match="dimensions"):
        exact_search(np.zeros((1, 3)), np.zeros((2, 4)))


def test_texts_of_a_folder_keep_their_places(tmp_path):
    (tmp_path / "a.txt").write_text("first line\nsecond line\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "third"}))
    found = list(source_documents([str(tmp_path)])())
    assert [(d.text, d.source) for d in found] == [
        ("first line", "a.txt:1"),
        ("second line", "a.txt:2"),
        ("third", "b.jsonl:1"),
    ]
    with pytest.raises(ValueError):
        source_documents([str(tmp_path / "missing.txt")])


def test_reranking_sorts_hits_by_the_scores_of_pairs():
    hits = [
        SearchHit(0.9, "a", "x:1", 0),
        SearchHit(0.8, "bb", "x:2", 1),
        SearchHit(0.7, "c", "x:3", 2),
    ]
    best = rerank(lambda pairs: [len(text) for _, text in pairs], "query", hits, top_k=2)
    assert [(hit.number, hit.score) for hit in best] == [(1, 2.0), (0, 1.0)]


def test_mined_negatives_are_texts_of_other_pairs():
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    pairs = draw_pairs(24)
    mined = mine_negatives(pairs, make_model(), num_negatives=2, verbose=False)
    answers = dict(zip(pairs.queries, pairs.positives))
    assert set(mined.queries) <= set(pairs.queries)
    for query, positive, negatives in zip(mined.queries, mined.positives, mined.negatives):
        assert answers[query] == positive and positive not in negatives
        assert 1 <= len(negatives) <= 2 and set(negatives) <= set(pairs.positives)
