"A bi-encoder's vectors do not depend on the batch, and others open its directory without bertlab."

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from embedding_cases import WORDS, small_config, small_tokenizer
from torch.nn import functional as F

from bertlab.data.tokenizers import load_tokenizer
from bertlab.embeddings.bi_encoder import (
    BiEncoder,
    find_similarity,
    map_threads,
    length_batches,
    read_st_config,
    similarity,
)
from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.encoder import BertLabModel


def make_model(kind="modernbert", **options):
    torch.manual_seed(0)
    config = BertLabConfig(**small_config(kind))
    return BiEncoder(BertLabModel(config), small_tokenizer(), **options).eval()


def draw_texts(count=70, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(1, 12, count)]


@pytest.mark.parametrize("kind", ["modernbert", "bert"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_together_have_the_vectors_that_they_have_alone(kind, pooling):
    model, texts = make_model(kind, pooling=pooling), draw_texts()
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
    whole = model.encode(texts)[:, :8]
    assert np.allclose(cut, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    "kind, pooling, normalize", [("modernbert", "mean", True), ("bert", "cls", False)]
)
def test_a_saved_model_loads_with_all_its_choices(tmp_path, kind, pooling, normalize):
    model, texts = (
        make_model(kind, pooling=pooling, normalize=normalize, max_sequence_length=10),
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


@pytest.mark.parametrize(
    "kind, options", [("modernbert", {}), ("bert", {"pooling": "cls", "normalize": False})]
)
def test_sentence_transformers_opens_it_without_bertlab(tmp_path, kind, options):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    model = make_model(kind, max_sequence_length=12, **options)
    texts = [*draw_texts(20), " ".join(WORDS)]  # the last is cut
    model.save(tmp_path / "model")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, "-c", OPENED_WITHOUT_US, "model", "texts.json", "vectors.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "3" if model.normalize else "2"]
    assert np.abs(np.load(tmp_path / "vectors.npy") - model.encode(texts)).max() < 2e-6


def test_what_sentence_transformers_wrote_is_read(tmp_path):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    from sentence_transformers import SentenceTransformer

    model = make_model("bert", max_sequence_length=12)
    model.save(tmp_path / "ours")
    SentenceTransformer(str(tmp_path / "ours"), device="cpu").save(str(tmp_path / "theirs"))
    again = BiEncoder.load(tmp_path / "theirs")
    assert (again.pooling, again.normalize) == ("mean", True)
    assert np.abs(again.encode(draw_texts(9)) - model.encode(draw_texts(9))).max() < 1e-6


def test_a_chosen_length_replaces_the_tokenizers(tmp_path):
    encoder = lambda length: BertLabModel(
        BertLabConfig(**{**small_config(), "max_position_embeddings": length})
    )  # noqa: E731
    tokenizer = load_tokenizer(BiEncoder(encoder(16), small_tokenizer()).save(tmp_path / "short"))
    place = BiEncoder(encoder(64), tokenizer, max_sequence_length=16).save(tmp_path / "long")
    assert load_tokenizer(place).model_max_length == BiEncoder.load(place).max_sequence_length == 16


def test_packed_rows_are_no_longer_than_the_encoders_positions():
    tokenizer = small_tokenizer()
    small = modernbert_tiny(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=1,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=32,
    )  # fmt: skip
    model = BiEncoder(BertLabModel(small), tokenizer, max_sequence_length=16)
    texts = draw_texts(30)
    one_by_one = np.concatenate([model.encode([text]) for text in texts])
    assert np.abs(model.encode(texts) - one_by_one).max() < 1e-5


DENSE = [
    {"path": "", "type": "m.Transformer"},
    {"path": "1_Pooling", "type": "m.Pooling"},
    {"path": "3_Dense", "type": "m.Dense"},
]


@pytest.mark.parametrize("name, content, words", [
    ("modules.json", DENSE, "Dense"), ("modules.json", {"a": 1}, "modules.json"), ("modules.json", [{"path": ""}], "modules.json"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"), ("1_Pooling/config.json", [], "1_Pooling/config.json"),
    ("sentence_bert_config.json", {"max_seq_length": "512"}, "max_seq_length"),
    ("config_sentence_transformers.json", {"prompts": ["a"]}, "config_sentence_transformers.json"),
])  # fmt: skip
def test_directories_that_bertlab_cannot_read_are_refused(tmp_path, name, content, words):
    make_model().save(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_st_config(tmp_path)


@pytest.mark.parametrize("options, words", [
    ({"pooling": "max"}, "'max'"), ({"max_sequence_length": 2}, "max_sequence_length.*2"), ({"max_sequence_length": 10**6}, "1000000"),
])  # fmt: skip
def test_wrong_options_of_a_model_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make_model(**options)


@pytest.mark.parametrize(
    "texts, options, words",
    [("a text", {}, "texts"), (["a", None], {}, "texts"), (["a"], {"truncate_dim": 33}, "33")],
)
def test_wrong_texts_are_refused(texts, options, words):
    with pytest.raises(ValueError, match=words):
        make_model().encode(texts, **options)


def test_no_texts_and_an_empty_text_are_encoded():
    model = make_model()
    assert model.encode([]).shape == (0, 32) and np.isfinite(model.encode([""])).all()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_batches_on_their_own_cores_have_the_vectors_of_one_thread(two_threads):
    model, texts = make_model().train(), draw_texts(200)
    together = model.encode(texts, batch_tokens=64)
    assert model.training, "as it was"
    torch.set_num_threads(1)
    np.testing.assert_allclose(together, model.encode(texts, batch_tokens=64), atol=1e-6)


def test_autocast_of_the_caller_holds_on_every_core(two_threads):
    kinds = set()
    with torch.autocast("cpu", torch.bfloat16):
        map_threads(lambda x: kinds.add((x @ x).dtype), [torch.eye(4)] * 4)
    map_threads(lambda x: kinds.add((x @ x).dtype), [torch.eye(4)] * 4)
    assert kinds == {torch.bfloat16, torch.float32}


def test_prompts_are_kept_and_a_default_prompt_is_refused(
    tmp_path,
):
    place = make_model().save(tmp_path / "model")
    path = place / "config_sentence_transformers.json"
    path.write_text(
        json.dumps(
            {
                "prompts": {"query": "find: "},
                "default_prompt_name": None,
                "similarity_fn_name": "dot",
            }
        )
    )
    again = BiEncoder.load(place).save(tmp_path / "again") / path.name
    assert json.loads(again.read_text()) == json.loads(path.read_text())
    path.write_text(json.dumps({"prompts": {"query": "find: "}, "default_prompt_name": "query"}))
    with pytest.raises(ValueError, match="default_prompt_name='query'"):
        BiEncoder.load(place)


def with_st_config(place, **said):
    "Change what a saved model says of calls."
    path = place / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    return place


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["cosine", "dot", None])
def test_similarity_equals_sentence_transformers(tmp_path, name, normalize):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    from sentence_transformers import SentenceTransformer

    place = with_st_config(
        make_model("bert", normalize=normalize).save(tmp_path / "model"), similarity_fn_name=name
    )
    model, theirs, texts = (
        BiEncoder.load(place),
        SentenceTransformer(str(place), device="cpu"),
        draw_texts(12),
    )
    expected = theirs.similarity(theirs.encode(texts[:4]), theirs.encode(texts)).numpy()
    found = similarity(model, model.encode(texts[:4]), model.encode(texts))
    assert np.abs(found - expected).max() < 1e-4 and find_similarity(theirs) == find_similarity(
        model
    ) == (name or "cosine")


@pytest.mark.parametrize("prompts", [
    {"query": "find alpha: ", "document": "beta gamma: ", "passage": "no"}, {"query": "find alpha: "}, {"query": None, "other": "no"}, {},
])  # fmt: skip
def test_prompts_equal_sentence_transformers(tmp_path, prompts):
    pytest.importorskip("sentence_transformers", reason="needs the embeddings extra")
    from sentence_transformers import SentenceTransformer

    place = with_st_config(make_model("bert").save(tmp_path / "model"), prompts=prompts)
    model, theirs, texts = (
        BiEncoder.load(place),
        SentenceTransformer(str(place), device="cpu"),
        draw_texts(6),
    )
    assert np.abs(model.encode_query(texts) - theirs.encode_query(texts)).max() < 2e-6
    assert np.abs(model.encode_document(texts) - theirs.encode_document(texts)).max() < 2e-6
    assert np.array_equal(
        model.encode_query(texts), model.encode_query([model.query_prompt + text for text in texts])
    ), "once"


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ({"passage": "a: ", "corpus": "no"}, "a: "),
        ({"document": "", "passage": "a: "}, "a: "),
        ({"document": None, "corpus": "a: "}, "a: "),
        ({"query": "no"}, ""),
    ],
)
def test_the_document_prompt_has_three_names(prompts, expected):
    assert make_model(st_config={"prompts": prompts}).document_prompt == expected


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
