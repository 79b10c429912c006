"Prompts stay clean, ends count for one word, and the loss divides by what may be written."

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.cli.main import main
from bertlab.cli.write import was_taught_ends
from bertlab.data.collators import MaskedDiffusionCollator
from bertlab.data.diffusion import (
    count_ends,
    token_weights,
    encode_pairs,
)
from bertlab.data.module import PretrainingDataModule
from bertlab.data.packing import PackedDataset
from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.tokens import TokenizedDocuments
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedDiffusion
from bertlab.train.modules import PretrainingModule

torch.set_num_threads(1)
PAD, CLS, SEP, MASK = 0, 2, 3, 1
WORDS = Vocabulary(12, pad_token_id=PAD, mask_token_id=MASK, special_token_ids=(CLS, SEP))


def by_hand(document: list[int]) -> list[float]:
    "Shares: an end is a [SEP] right before another one, and all ends count for one word."
    ends = [a == b == SEP for a, b in zip(document, [*document[1:], None])]
    return [1 / sum(ends) if end else float(token > SEP) for token, end in zip(document, ends)]


documents = st.lists(
    st.lists(st.sampled_from([5, 6, 7, SEP]), min_size=1, max_size=8), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(documents, st.integers(0, 3))
def test_weights_in_packed_rows_are_those_of_each_document_alone(bodies, padding):
    rows = [[CLS, *body, SEP] for body in bodies]
    ids = np.array([[t for row in rows for t in row] + [PAD] * padding])
    numbers = np.array([[n for n, row in enumerate(rows, 1) for _ in row] + [0] * padding])
    shares = token_weights({"input_ids": ids, "attention_mask": numbers}, WORDS, SEP)
    expected = [s for row in rows for s in by_hand(row)] + [0.0] * padding
    np.testing.assert_allclose(shares[0], expected, rtol=1e-6)


def test_packed_rows_keep_prompts_and_hide_ends():
    documents = TokenizedDocuments.from_sequences([[5, 6, SEP, 7, SEP, SEP], [8, 9]], [3, 0])
    dataset = PackedDataset(documents, 16, pad_token_id=PAD, cls_token_id=CLS,
                            sep_token_id=SEP, shuffle=False)  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      num_steps=1, noise_eps=0.0)  # fmt: skip
    batch = collate([dataset[0, 0]])
    hidden = batch["labels"][0] >= 0
    retained = {
        tuple(batch["input_ids"][0][batch["attention_mask"][0] == n].tolist()) for n in (1, 2)
    }
    # The given prompt stays; the word and both ends are hidden at time 1.
    assert (CLS, 5, 6, SEP, MASK, MASK, MASK, SEP) in retained and (
        CLS,
        MASK,
        MASK,
        SEP,
    ) in retained
    assert batch["token_shares"].sum() == pytest.approx(1 + 1 + 2) and int(hidden.sum()) == 5


def test_pairs_are_prompts_texts_and_ends():
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 9, vocab_size=60)
    end, prompts, texts = tokenizer.sep_token_id, ["mat", "the mat"], ["the cat", "sat on"]
    for pair, length, prompt, text in zip(
        *encode_pairs(tokenizer, texts, prompts, 5, 3), prompts, texts
    ):
        assert tokenizer.decode(pair[: length - 1]) == prompt and pair[length - 1] == end
        assert tokenizer.decode(pair[length:], skip_special_tokens=True) == text
    counts = np.bincount(count_ends(range(500), 5))
    assert len(counts) == 6 and counts[0] == 0 and counts[1:].min() > 60
    assert end not in encode_pairs(tokenizer, ["the [SEP] cat"], ["a"], max_ends=0)[0][0][2:]


def test_the_loss_divides_by_the_words_that_count():
    torch.manual_seed(0)
    config = dict(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    module = PretrainingModule(config, objective="diffusion")
    module.configure_model()
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      max_sequence_length=16, seed=1)  # fmt: skip
    batch = collate(
        [[CLS, 5, 6, SEP, 7, 8, 9, SEP, SEP, SEP, SEP], [CLS, 5, 8, 9, 10, 11, SEP, SEP]]
    )
    parts = module.label_loss(batch)
    with torch.no_grad():
        logits = module.model(batch["input_ids"], batch["attention_mask"]).logits
    nats = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"], reduction="none"
    )
    labelled = batch["labels"] >= 0
    assert parts.loss_sum.item() == pytest.approx(
        (nats * batch["loss_weights"] * labelled).sum().item(), rel=1e-4
    )
    assert parts.num_labels.item() == pytest.approx(6 + 6)


def test_accumulating_two_rows_is_the_batch_of_both():
    torch.manual_seed(0)
    model = BertLabForMaskedDiffusion(modernbert_tiny(vocab_size=12, hidden_size=16, intermediate_size=16,
                                                      num_hidden_layers=1, num_attention_heads=1)).eval()  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      max_sequence_length=12)  # fmt: skip
    rows = [[CLS, 5, SEP, 7, 8, SEP, SEP], [CLS, 5, 8, 9, 10, 11, SEP, SEP, SEP]]
    rows = [{"input_ids": row, "epoch": 0, "index": i} for i, row in enumerate(rows)]
    run = lambda subset: model(**{k: v for k, v in collate(subset).items()})  # noqa: E731
    both, parts = run(rows), [run([row]) for row in rows]
    assert both.loss_sum.item() == pytest.approx(sum(p.loss_sum.item() for p in parts), rel=1e-5)
    assert both.num_labels.item() == pytest.approx(sum(p.num_labels.item() for p in parts))


@pytest.mark.parametrize("options, fragment", [
    (dict(schedule="sine"), "schedule='sine' is unknown"), (dict(writing=True), "writing=True needs end_token_id"),
    (dict(end_token_id=3), "read with writing=True alone"),
])  # fmt: skip
def test_a_collator_that_cannot_be_is_refused(options, fragment):
    with pytest.raises(ValueError, match=fragment):
        MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], **options)


def test_the_data_module_appends_ends_that_are_labels():
    from bertlab.data.module import PretrainingDataModule

    texts = [f"the cat sat on mat {n} and so on" for n in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=90)
    batches_by_name = {}
    for most in (0, 6):
        data = PretrainingDataModule(None, tokenizer, "diffusion", 64, max_ends=most, train_batch_size=2,
                                     collator_kwargs=dict(num_steps=1, noise_eps=0.0))  # fmt: skip
        data.set_datasets(texts, texts[:4])
        data.setup()
        documents = data.train_dataset.documents
        batches_by_name[most] = [documents[n].tolist() for n in range(len(documents))]
        batch = next(iter(data.train_dataloader()))
        assert ((batch["labels"] == tokenizer.sep_token_id).any().item()) == (most > 0)
    for before, after in zip(batches_by_name[0], batches_by_name[6], strict=True):
        ends = after[len(before) :]
        assert (
            after[: len(before)] == before
            and 1 <= len(ends) <= 6
            and set(ends) == {tokenizer.sep_token_id}
        )
    for options in (
        dict(objective="mlm"),
        dict(objective="diffusion", streaming=True, name="a.txt"),
    ):
        with pytest.raises(ValueError, match="max_ends=3"):
            PretrainingDataModule(options.pop("name", None), tokenizer, max_ends=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"overflow": "truncate"},
        {"overflow": "truncate_left"},
    ],
)
def test_no_window_consists_of_ends_alone(options):
    from bertlab.data.module import PretrainingDataModule

    tokenizer = train_tokenizer(["the cat sat on a mat"] * 9, vocab_size=40)
    texts, end = [" ".join(["cat"] * n) for n in range(1, 60)], tokenizer.sep_token_id
    words = {}
    for most in (0, 8):
        data = PretrainingDataModule(
            None, tokenizer, "diffusion", 16, max_ends=most, data_kwargs=options or None
        )
        data.set_datasets(texts, texts)
        data.setup()
        for rows in (data.train_dataset, *data.val_datasets):
            spans = [
                rows.documents.tokens[start:stop]
                for start, stop in zip(rows.windows.starts, rows.windows.stops)
            ]
            assert all((span != end).any() for span in spans), "a piece with a word in it"
            words.setdefault(most, []).append(sum(int((span != end).sum()) for span in spans))
            if options.get("overflow") != "truncate":  # which cuts ends away like words
                assert (sum(int(span[-1] == end) for span in spans) > len(texts) // 2) == (most > 0)
    assert words[0] == words[8] or "overflow" in options or "stride" in options


NOUNS, PLACES = (
    "cat dog house door sea town tree boat bird stone".split(),
    ("on the mat", "in the house", "near the sea"),
)
QUESTIONS = [
    {"ask": f"what is the {noun} {path}", "say": f"it is a {noun}"}
    for noun in NOUNS
    for path in PLACES
]


def write_table(file_format: str, directory: Path) -> str:
    "The same pairs as a file, or as a directory in hub form."
    if file_format == "hub":
        Dataset.from_list(QUESTIONS).to_parquet(directory / "data" / "train-00000-of-00001.parquet")
        (directory / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n"
        )
        return str(directory)
    path = directory / f"pairs.{file_format}"
    table = Dataset.from_list(QUESTIONS)
    {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet}[file_format](path)
    return str(path)


def pair_data(tokenizer, source=None, **options) -> PretrainingDataModule:
    settings = {"objective": "diffusion", "prompt_column": "ask", "text_column": "say", "max_ends": 3,
                "max_sequence_length": 32, "train_batch_size": 4, "data_kwargs": {"validation_fraction": 0.2}}  # fmt: skip
    return PretrainingDataModule(source, tokenizer, **{**settings, **options})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(row.values()) for row in QUESTIONS] * 4, vocab_size=150)


@pytest.mark.parametrize("file_format", ["csv", "jsonl", "parquet", "hub", "memory"])
def test_prompts_of_any_table_are_never_hidden(file_format, tokenizer, tmp_path):
    data = pair_data(
        tokenizer, None if file_format == "memory" else write_table(file_format, tmp_path)
    )
    if file_format == "memory":
        data.set_datasets(Dataset.from_list(QUESTIONS))
    assert "what is" in data.training_texts()[0]
    data.setup()
    pairs = set()
    for batch in data.train_dataloader():
        labels_BL, numbers_BL = batch["labels"].numpy(), batch["attention_mask"].numpy()
        ids_BL = np.where(labels_BL >= 0, labels_BL, batch["input_ids"].numpy())
        assert (labels_BL == tokenizer.sep_token_id).any()
        for ids, numbers, labels in zip(ids_BL, numbers_BL, labels_BL):
            for n in range(1, numbers.max() + 1):
                document = ids[numbers == n].tolist()
                length = document.index(tokenizer.sep_token_id) + 1
                assert (labels[numbers == n][:length] < 0).all()
                parts = document[:length], document[length:]
                pairs.add(tuple(tokenizer.decode(part, skip_special_tokens=True) for part in parts))
    assert sum(map(len, data.val_datasets)) and len(pairs) > 8
    assert pairs < {(row["ask"], row["say"]) for row in QUESTIONS}


@pytest.mark.parametrize("options, message", [
    ({"objective": "mlm"}, "max_ends=3.*objective"), ({"max_ends": 0}, "prompt_column.*max_ends"),
    ({"streaming": True}, "max_ends=3.*streaming"), ({"cache_dir": "x"}, "prompt_column.*cache_dir"),
    ({"data_kwargs": {"length_mixture": {8: 0.5, 32: 0.5}}}, "length_mixture"),
])  # fmt: skip
def test_options_that_prompts_exclude_are_refused(options, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        pair_data(tokenizer, write_table("csv", tmp_path), **options)


def test_sources_without_prompts_are_refused(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of many\n" for n in range(40)))
    with pytest.raises(ValueError, match="text.txt.*prompt_column"):
        pair_data(tokenizer, str(tmp_path / "text.txt")).setup()
    with pytest.raises(ValueError, match="prompt_column"):
        pair_data(tokenizer).setup()
    with pytest.raises(ValueError, match="'question'.*'ask'|'ask'.*'question'"):
        pair_data(tokenizer, write_table("csv", tmp_path), prompt_column="question").setup()


def test_an_answer_that_is_too_long_is_cut(tokenizer):
    data = pair_data(tokenizer, data_kwargs={"validation_fraction": 0})
    row = {"ask": "what is the cat", "say": "it is a mat " * 30}
    data.set_datasets(Dataset.from_list([row]), Dataset.from_list(QUESTIONS))
    data.setup()
    assert len(data.train_dataset) == 1
    text = tokenizer.decode(data.train_dataset[0, 0]["input_ids"], skip_special_tokens=True)
    assert text.startswith("what is the cat it is")


@pytest.mark.parametrize("blank", ["", "   ", "too long"])
def test_a_prompt_without_an_answer_is_left_out(blank, tokenizer):
    prompts = [f"return the value {n}" + " of it" * 30 * (blank == "too long") for n in range(30)]
    rows = {"ask": prompts, "say": [blank] * 30}
    alone, mixed = pair_data(tokenizer), pair_data(tokenizer)
    alone.set_datasets(Dataset.from_dict(rows))
    with pytest.raises(ValueError, match="max_sequence_length"):
        alone.setup()
    mixed.set_datasets(Dataset.from_list([*QUESTIONS, *Dataset.from_dict(rows)]))
    with pytest.warns(UserWarning, match="prompts have an empty text"):
        mixed.setup()
    texts = [tokenizer.decode(ids) for ids in mixed.train_dataset.documents]
    assert texts and not any("value" in text for text in texts)


def test_the_command_learns_from_pairs_and_answers(tmp_path, capsys):
    source = write_table("jsonl", tmp_path)
    shape = (
        ("hidden_size", 16),
        ("intermediate_size", 24),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 1),
    )
    words = ["pretrain", "--model.objective", "diffusion", "--data.train_dataset_name_or_path", source, "--data.prompt_column",
             "ask", "--data.text_column", "say", "--data.max_ends", "2", "--data.max_sequence_length", "32", "--run.vocab_size",
             "150", "--trainer.max_steps", "2", "--data.train_batch_size", "2", "--run.progress", "none", "--run.output", str(tmp_path / "run"),
             *(word for name, value in shape for word in (f"--model.model_config_kwargs.{name}", str(value)))]  # fmt: skip
    assert main(words) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "write",
                str(tmp_path / "run"),
                "what is the cat",
                "--mode",
                "answer",
                "--max_new_tokens",
                "4",
            ]
        )
        == 0
    )
    assert "what is the cat" not in capsys.readouterr().out and was_taught_ends(tmp_path / "run")
