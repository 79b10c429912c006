"A bi-encoder's vectors do not depend on the batch, and others open its directory without bertlab."

import json
import warnings
import subprocess
import sys

import numpy as np
import pytest
import torch
from embedding_cases import WORDS, small_config, small_tokenizer
from torch.nn import functional as F

from bertlab.embeddings.bi_encoder import (
    BiEncoder,
    find_similarity,
    length_batches,
    read_st_config,
    similarity,
)
from bertlab.model.config import BertLabConfig
from bertlab.model.encoder import BertLabModel


def make_model(family="modernbert", **options):
    torch.manual_seed(0)
    config = BertLabConfig(**small_config(family))
    return BiEncoder(BertLabModel(config), small_tokenizer(), **options).eval()


def draw_texts(count=70, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(1, 12, count)]


@pytest.mark.parametrize("family", ["modernbert", "bert"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_together_have_the_vectors_that_they_have_alone(family, pooling):
    model, texts = make_model(family, pooling=pooling), draw_texts()
    together = model.encode(texts, batch_tokens=64)
    alone = []
    for text in texts:
        states = model.encoder(**small_tokenizer()(text, return_tensors="pt")).last_hidden_state[0]
        alone.append(
            F.normalize(states.mean(0) if pooling == "mean" else states[0], dim=0).detach().numpy()
        )
    assert np.abs(together - np.stack(alone)).max() < 2e-6
    assert np.abs(model.encode(texts[::-1])[::-1] - together).max() < 2e-6


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_the_plan_takes_each_text_once_and_no_row_is_too_short(count):
    lengths = np.random.default_rng(count).integers(1, 200, count)
    plan = list(length_batches(lengths, 512, 64))
    assert sorted(n for members, _ in plan for n in members) == list(range(count))
    assert all(lengths[members].max() <= row_length for members, row_length in plan)


def test_a_prefix_of_a_vector_is_normed_anew():
    model, texts = make_model(), draw_texts(10)
    cut = model.encode(texts, truncate_dim=8)
    assert cut.shape == (10, 8) and np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    vectors_ND = model.encode(texts)[:, :8]
    assert np.allclose(
        cut, vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True), atol=1e-6
    )


@pytest.mark.parametrize("matryoshka_dims, requested_dim, warns", [
    ([8], 16, True), ([], 8, True), ([8], 8, False), ([8], 32, False), (None, 16, True),
])  # fmt: skip
def test_a_width_that_was_never_trained_gets_a_warning(
    tmp_path, matryoshka_dims, requested_dim, warns
):
    make_model(st_config={"matryoshka_dims": matryoshka_dims}).save(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        BiEncoder.load(tmp_path).encode(["alpha"], truncate_dim=requested_dim)
    assert [
        f"width {requested_dim} " in str(w.message) for w in caught if w.category is UserWarning
    ] == [True] * warns


@pytest.mark.parametrize(
    "family, pooling, normalize", [("modernbert", "mean", True), ("bert", "cls", False)]
)
def test_a_saved_model_loads_with_all_its_choices(tmp_path, family, pooling, normalize):
    model, texts = (
        make_model(family, pooling=pooling, normalize=normalize, max_sequence_length=10),
        draw_texts(20),
    )
    model.save(tmp_path)
    again = BiEncoder.load(tmp_path)
    assert (again.pooling, again.normalize, again.max_sequence_length) == (pooling, normalize, 10)
    assert np.abs(again.encode(texts) - model.encode(texts)).max() < 1e-6
    assert BiEncoder.load(tmp_path, pooling="mean").pooling == "mean"


OPENED_WITHOUT_US = """
import sys, json
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bertlab":
            raise ModuleNotFoundError("bertlab is not here")
sys.meta_path.insert(0, Refuse())
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.load(open(sys.argv[2]))
vectors = model.encode(texts)
import numpy
numpy.save(sys.argv[3], vectors)
assert "bertlab" not in sys.modules
print(model.max_seq_length, len(list(model.children())))
"""


def test_sentence_transformers_opens_it_without_bertlab(tmp_path):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    model = make_model("modernbert", max_sequence_length=12, pooling="cls", normalize=False)
    texts = [*draw_texts(20), " ".join(WORDS)]  # the last is cut
    model.save(tmp_path / "model")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, "-c", OPENED_WITHOUT_US, "model", "texts.json", "vectors.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "2"]
    assert np.abs(np.load(tmp_path / "vectors.npy") - model.encode(texts)).max() < 2e-6


def test_no_texts_and_an_empty_text_are_encoded():
    model = make_model()
    assert model.encode([]).shape == (0, 32) and np.isfinite(model.encode([""])).all()


@pytest.mark.parametrize("name", ["deberta-v2", "mpnet", "albert", "distilbert"])
def test_any_encoder_of_transformers_encodes_padded_rows(name):
    from transformers import AutoConfig, AutoModel

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    if name == "distilbert":
        sizes = dict(dim=32, n_layers=2, n_heads=2, hidden_dim=48)
    tokenizer = small_tokenizer()
    ids = dict(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    encoder = AutoModel.from_config(AutoConfig.for_model(name, **sizes, **ids)).eval()
    model, texts = BiEncoder(encoder, tokenizer, max_sequence_length=32), draw_texts(30)
    with torch.no_grad():
        rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        expected = F.normalize(torch.cat([encoder(row).last_hidden_state.mean(1) for row in rows]))
    np.testing.assert_allclose(model.encode(texts), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("name, content, words", [
    ("modules.json", [{"path": "", "type": "m.Transformer"}, {"path": "3", "type": "m.Dense"}], "Dense"),
    ("modules.json", {"a": 1}, "modules.json"), ("modules.json", [{"path": ""}], "modules.json"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
    ("config_sentence_transformers.json", {"prompts": {"query": "x"}, "default_prompt_name": "query"}, "'query'"),
])  # fmt: skip
def test_unsupported_directories_are_refused(tmp_path, name, content, words):
    make_model().save(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_st_config(tmp_path)


@pytest.mark.parametrize("options, arguments, words", [
    ({"pooling": "max"}, (["a"],), "'max'"), ({"max_sequence_length": 2}, (["a"],), "max_sequence_length=2"),
    ({}, ("a text",), "texts"), ({}, (["a"], 33), "truncate_dim=33"),
])  # fmt: skip
def test_wrong_options_are_named(options, arguments, words):
    with pytest.raises(ValueError, match=words):
        make_model(**options).encode(*arguments)


@pytest.mark.parametrize("prompts, similarity_name, normalize", [
    ({"query": "find alpha: ", "document": "beta gamma: ", "passage": "no"}, "cosine", False),
    ({"query": "find alpha: ", "document": "", "passage": "beta: "}, "dot", False),
    ({"query": None, "other": "no"}, None, True), ({}, "dot", True),
])  # fmt: skip
def test_both_sides_equal_sentence_transformers(tmp_path, prompts, similarity_name, normalize):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    from sentence_transformers import SentenceTransformer

    directory, texts = (
        make_model("bert", normalize=normalize).save(tmp_path / "model"),
        draw_texts(12),
    )
    config = {"prompts": prompts, "similarity_fn_name": similarity_name}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
    reference = SentenceTransformer(str(directory), device="cpu")
    reference.save(str(tmp_path / "theirs"))
    for model in (BiEncoder.load(directory), BiEncoder.load(tmp_path / "theirs")):
        queries, documents = model.encode_query(texts), model.encode_document(texts)
        assert np.abs(queries - reference.encode_query(texts)).max() < 2e-6
        if prompts.get("document") != "":  # theirs writes an empty one for a passage
            assert np.abs(documents - reference.encode_document(texts)).max() < 2e-6
        expected = reference.similarity(queries, documents).numpy()
        assert np.abs(similarity(model, queries, documents) - expected).max() < 1e-4
        assert find_similarity(reference) == find_similarity(model) == (similarity_name or "cosine")
