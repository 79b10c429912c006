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
    DiffusionConfig,
    find_parts,
    token_weights,
    elbo_weight,
    encode_pairs,
)
from bertlab.data.module import PretrainingDataModule
from bertlab.data.packing import PackedDataset
from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedDiffusion
from bertlab.train.modules import PretrainingModule

torch.set_num_threads(1)
PAD, CLS, SEP, MASK = 0, 2, 3, 1
WORDS = Vocabulary(12, pad_token_id=PAD, mask_token_id=MASK, special_token_ids=(CLS, SEP))


def by_hand(
    document: list[int],
) -> list[float]:  # shares, from the form [CLS] (prompt [SEP])? text [SEP]*
    stop = len(document)
    while document[stop - 1] == SEP:
        stop -= 1
    ends = len(document) - stop - 1  # the last one closes the document
    inner = [i for i in range(stop) if document[i] == SEP]
    begin = inner[0] + 1 if inner else 0
    shares = [0.0] * len(document)
    for i in range(begin, stop):
        shares[i] = float(document[i] not in (CLS, SEP, PAD, MASK))
    for i in range(stop, stop + ends):
        shares[i] = 1 / ends
    return shares


documents = st.lists(
    st.lists(st.sampled_from([5, 6, 7, SEP]), min_size=1, max_size=8), min_size=1, max_size=5
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(documents, st.integers(0, 3))
def test_parts_are_found_in_packed_rows_as_in_each_document_alone(bodies, padding):
    rows = [[CLS, *body, SEP] for body in bodies]
    ids = np.array([[t for row in rows for t in row] + [PAD] * padding])
    numbers = np.array([[n for n, row in enumerate(rows, 1) for _ in row] + [0] * padding])
    shares = token_weights({"input_ids": ids, "attention_mask": numbers}, WORDS, SEP)
    expected = [s for row in rows for s in by_hand(row)] + [0.0] * padding
    np.testing.assert_allclose(shares[0], expected, rtol=1e-6)
    prompt, ends = find_parts(ids, numbers, SEP)
    assert not (prompt & ends).any() and not (prompt | ends)[numbers == 0].any()


def test_packed_rows_mark_them_as_well():
    dataset = PackedDataset([[5, 6, SEP, 7, SEP, SEP], [8, 9]], 16, pad_token_id=PAD, cls_token_id=CLS,
                            sep_token_id=SEP, shuffle=False)  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      num_steps=1, noise_eps=0.0)  # fmt: skip
    batch = collate([dataset[0, 0]])
    hidden = batch["labels"][0] >= 0
    kept = {tuple(batch["input_ids"][0][batch["attention_mask"][0] == n].tolist()) for n in (1, 2)}
    # The given prompt stays; the word and both ends are hidden at time 1.
    assert (CLS, 5, 6, SEP, MASK, MASK, MASK, SEP) in kept and (CLS, MASK, MASK, SEP) in kept
    assert batch["token_shares"].sum() == pytest.approx(1 + 1 + 2) and int(hidden.sum()) == 5


def test_ends_of_a_document_weigh_as_much_as_one_word_however_many_they_are():
    for count in (1, 4, 9):
        rule = DiffusionConfig(end_token_id=SEP)
        ids = np.array([[CLS, 5, 6, *[SEP] * count, SEP]])
        shares = token_weights(
            {"input_ids": ids, "attention_mask": np.ones_like(ids)}, WORDS, rule.end_token_id
        )
        assert shares[ids == SEP].sum() == pytest.approx(1) and shares.sum() == pytest.approx(3)


def test_texts_for_writing_pass_a_tokenizer_and_come_back_as_parts():
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 9, vocab_size=60)
    made = encode_pairs(tokenizer, ["the cat", "sat on"], ["mat", "the mat"], max_ends=5, seed=3)
    counts = []
    for row, prompt, answer in zip(made, ["mat", "the mat"], ["the cat", "sat on"]):
        ids = np.array([[tokenizer.cls_token_id, *row, tokenizer.sep_token_id]])
        given_BL, ends_BL = find_parts(ids, np.ones_like(ids), tokenizer.sep_token_id)
        assert tokenizer.decode(ids[given_BL], skip_special_tokens=True) == prompt
        assert tokenizer.decode(ids[~given_BL & ~ends_BL], skip_special_tokens=True) == answer
        counts.append(int(ends_BL.sum()))
    assert all(1 <= c <= 5 for c in counts)
    end = tokenizer.sep_token_id
    many = [row.count(end) for row in encode_pairs(tokenizer, ["the"] * 500, max_ends=5)]
    assert set(many) == {1, 2, 3, 4, 5} and min(many.count(n) for n in set(many)) > 60
    assert end not in encode_pairs(tokenizer, ["the [SEP] cat"], max_ends=0)[0]  # it says the word
    with pytest.raises(ValueError, match="prompts must be as many"):
        encode_pairs(tokenizer, ["x"], ["a", "b"])
    with pytest.raises(ValueError, match="max_ends"):
        encode_pairs(tokenizer, ["x"], max_ends=-1)


@pytest.mark.parametrize("plain", [False, True])
def test_the_loss_divides_by_the_words_that_count(plain):
    torch.manual_seed(0)
    config = dict(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    module = PretrainingModule(config, objective="diffusion", plain_mean=plain)
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
    labelled, shares = batch["labels"] >= 0, batch["token_shares"]
    weights = shares if plain else batch["loss_weights"]
    assert parts.loss_sum.item() == pytest.approx(
        (nats * weights * labelled).sum().item(), rel=1e-4
    )
    assert parts.num_labels.item() == pytest.approx(
        (shares * labelled).sum().item() if plain else 4 + 6
    )


def test_accumulating_two_rows_is_the_batch_of_both():
    torch.manual_seed(0)
    model = BertLabForMaskedDiffusion(modernbert_tiny(vocab_size=12, hidden_size=16, intermediate_size=16,
                                                      num_hidden_layers=1, num_attention_heads=1)).eval()  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      max_sequence_length=12)  # fmt: skip
    rows = [[CLS, 5, SEP, 7, 8, SEP, SEP], [CLS, 5, 8, 9, 10, 11, SEP, SEP, SEP]]
    rows = [{"input_ids": row, "epoch": 0, "index": i} for i, row in enumerate(rows)]
    run = lambda some: model(**{k: v for k, v in collate(some).items()})  # noqa: E731
    both, parts = run(rows), [run([row]) for row in rows]
    assert both.loss_sum.item() == pytest.approx(sum(p.loss_sum.item() for p in parts), rel=1e-5)
    assert both.num_labels.item() == pytest.approx(sum(p.num_labels.item() for p in parts))


def test_the_cosine_schedule_hides_less_for_longer_and_its_weights_add_up_too():
    rule = dict(noise_eps=0.0, sampling_eps=0.0)
    ids = [[5] * 60] * 800
    found = {}
    for schedule in ("linear", "cosine"):
        collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], max_sequence_length=60,
                                          schedule=schedule, **rule)  # fmt: skip
        batch = collate([{"input_ids": row, "epoch": 0, "index": i} for i, row in enumerate(ids)])
        found[schedule] = (batch["labels"] >= 0).double().mean().item()
        # The mean weighted count is the integral of the share's slope: all tokens, once.
        sums = batch["loss_weights"].sum(1).double() / 60
        assert abs(sums.mean().item() - 1) < 5 * sums.std().item() / 800**0.5
    assert found["linear"] == pytest.approx(0.5, abs=0.01) and found["cosine"] == pytest.approx(
        1 - 2 / np.pi, abs=0.01
    )
    assert elbo_weight(np.array([1.0]), "cosine")[0] == pytest.approx(np.pi / 2)


@pytest.mark.parametrize("options, said", [
    (dict(schedule="sine"), "schedule='sine' is unknown"), (dict(writing=True), "writing=True needs end_token_id"),
    (dict(end_token_id=3), "read with writing=True alone"),
])  # fmt: skip
def test_a_collator_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], **options)


def test_the_data_module_lays_ends_behind_texts_and_they_are_labels():
    from bertlab.data.module import PretrainingDataModule

    texts = [f"the cat sat on mat {n} and so on" for n in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=90)
    made = {}
    for most in (0, 6):
        data = PretrainingDataModule(None, tokenizer, "diffusion", 64, max_ends=most, train_batch_size=2,
                                     collator_kwargs=dict(num_steps=1, noise_eps=0.0))  # fmt: skip
        data.set_datasets(texts, texts[:4])
        data.setup()
        documents = data.train_dataset.documents
        made[most] = [documents[n].tolist() for n in range(len(documents))]
        batch = next(iter(data.train_dataloader()))
        assert ((batch["labels"] == tokenizer.sep_token_id).any().item()) == (most > 0)
    for before, after in zip(made[0], made[6], strict=True):
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
def test_no_piece_of_a_long_text_is_made_of_ends_alone_and_no_word_is_lost(options):
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


def test_an_empty_text_is_given_no_end():
    from bertlab.data.module import add_ends
    from bertlab.data.tokens import TokenizedDocuments

    documents = TokenizedDocuments.from_sequences([[], [7] * 4, [], [7] * 5, [3, 7]])
    made = add_ends(documents, 3, 6, room=4)
    found = [made[n].tolist() for n in range(len(made))]
    assert (
        found[:3] == [[], [7] * 4, []]
        and found[3][:6] == [7] * 5 + [3]
        and 6 <= len(found[3]) <= 8
        and found[4][:3] == [3, 7, 3]
    )


NOUNS, PLACES = (
    "cat dog house door sea town tree boat bird stone".split(),
    ("on the mat", "in the house", "near the sea"),
)
QUESTIONS = [
    {"ask": f"what is the {noun} {place}", "say": f"it is a {noun}"}
    for noun in NOUNS
    for place in PLACES
]


def write_table(kind: str, place: Path) -> str:
    "The same pairs as a file, or as a directory in hub form."
    if kind == "hub":
        Dataset.from_list(QUESTIONS).to_parquet(place / "data" / "train-00000-of-00001.parquet")
        (place / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n"
        )
        return str(place)
    path = place / f"pairs.{kind}"
    table = Dataset.from_list(QUESTIONS)
    {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet}[kind](path)
    return str(path)


def pair_data(tokenizer, source=None, **options) -> PretrainingDataModule:
    settings = {"objective": "diffusion", "prompt_column": "ask", "text_column": "say", "max_ends": 3,
                "max_sequence_length": 32, "train_batch_size": 4, "data_kwargs": {"validation_fraction": 0.2}}  # fmt: skip
    return PretrainingDataModule(source, tokenizer, **{**settings, **options})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(row.values()) for row in QUESTIONS] * 4, vocab_size=150)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "hub", "memory"])
def test_pairs_of_any_table_keep_their_prompts_and_learn_where_answers_end(
    kind, tokenizer, tmp_path
):
    data = pair_data(tokenizer, None if kind == "memory" else write_table(kind, tmp_path))
    if kind == "memory":
        data.set_datasets(Dataset.from_list(QUESTIONS))
    assert "\x1e" not in "".join(data.training_texts()) and "what is" in data.training_texts()[0]
    data.setup()
    seen, end = set(), tokenizer.sep_token_id
    for batch in data.train_dataloader():
        whole_BL = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"]).numpy()
        given_BL, ends_BL = find_parts(whole_BL, batch["attention_mask"].numpy(), end)
        assert not (given_BL & (batch["labels"].numpy() >= 0)).any(), (
            "a word of a prompt was hidden"
        )
        assert (batch["labels"] >= 0).any() and ends_BL.any()
        for ids, numbers, given_L in zip(whole_BL, batch["attention_mask"].numpy(), given_BL):
            for n in range(1, numbers.max() + 1):
                own = numbers == n
                seen.add((tokenizer.decode(ids[own & given_L], skip_special_tokens=True),
                          tokenizer.decode(ids[own & ~given_L], skip_special_tokens=True)))  # fmt: skip
    held_out = sum(len(rows) for rows in data.val_datasets)
    assert held_out and seen < {(row["ask"], row["say"]) for row in QUESTIONS} and len(seen) > 8


@pytest.mark.parametrize("options, message", [
    ({"objective": "mlm"}, "max_ends=3 is for objective"), ({"max_ends": 0}, "prompt_column.*max_ends"),
    ({"streaming": True}, "leave streaming and cache_dir out|max_ends"), ({"cache_dir": "x"}, "leave streaming and cache_dir out"),
    ({"data_kwargs": {"length_mixture": {8: 0.5, 32: 0.5}}}, "length_mixture"), ({"data_kwargs": {"overflow": "split"}}, "overflow"),
])  # fmt: skip
def test_prompts_where_they_make_no_sense_are_refused_at_once(
    options, message, tokenizer, tmp_path
):
    with pytest.raises(ValueError, match=message):
        pair_data(tokenizer, write_table("csv", tmp_path), **options)


def test_what_holds_no_pairs_is_one_sentence(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of many\n" for n in range(40)))
    with pytest.raises(ValueError, match="text.txt.*prompt_column"):
        pair_data(tokenizer, str(tmp_path / "text.txt")).setup()
    with pytest.raises(ValueError, match="the embedded text has no prompts"):
        pair_data(tokenizer).setup()
    for kind in ("csv", "jsonl", "parquet", "hub"):
        (place := tmp_path / kind).mkdir()
        with pytest.raises(ValueError, match="'question'.*'ask'|'ask'.*'question'"):
            pair_data(tokenizer, write_table(kind, place), prompt_column="question").setup()


QUESTION_ROWS = Dataset.from_list(QUESTIONS)


def test_an_answer_that_is_too_long_is_cut_and_not_parted_from_its_prompt(tokenizer):
    data = pair_data(tokenizer, data_kwargs={"validation_fraction": 0})
    data.set_datasets(
        Dataset.from_list([{"ask": "what is the cat", "say": "it is a mat " * 30}]), QUESTION_ROWS
    )
    data.setup()
    rows = [data.train_dataset[0, n] for n in range(len(data.train_dataset))]
    assert len(rows) == 1 and tokenizer.decode(
        rows[0]["input_ids"], skip_special_tokens=True
    ).startswith("what is the cat it is")


@pytest.mark.parametrize("blank", ["", "   "])
def test_a_prompt_without_an_answer_is_left_out_and_never_learnt_as_a_text(blank, tokenizer):
    asked = [f"return the value {n}" for n in range(30)]
    rows = {"ask": asked, "say": [blank if n % 3 == 0 else f"the list {n}" for n in range(30)]}
    data = pair_data(tokenizer)
    data.set_datasets(Dataset.from_dict(rows))
    with pytest.warns(UserWarning, match="prompts have an empty text"):
        data.setup()
    for batch in data.train_dataloader():
        assert (batch["token_shares"][batch["token_shares"] > 0].sum() > 0) and "value" not in tokenizer.decode(
            batch["input_ids"][batch["token_shares"] > 0])  # fmt: skip
    none = pair_data(tokenizer)
    none.set_datasets(Dataset.from_dict({**rows, "say": [blank] * 30}))
    with pytest.raises(ValueError, match="have an empty text"):
        none.setup()


def test_a_prompt_that_fills_its_row_is_left_out_and_never_learnt_as_a_text(tokenizer):
    long = {"ask": "what is the cat " * 30, "say": "it is a mat"}
    data = pair_data(tokenizer, data_kwargs={"validation_fraction": 0})
    data.set_datasets(Dataset.from_list([long, *QUESTIONS]), QUESTION_ROWS)
    with pytest.warns(UserWarning, match=r"1 of \d+ prompts .*in a row of 32 tokens"):
        data.setup()
    read = [
        tokenizer.decode(data.train_dataset[0, n]["input_ids"])
        for n in range(len(data.train_dataset))
    ]
    assert read and not any("what is the cat what" in text for text in read)
    data = pair_data(tokenizer, data_kwargs={"validation_fraction": 0})
    data.set_datasets(Dataset.from_list([long]), QUESTION_ROWS)
    with pytest.raises(ValueError, match="1 of 1 prompts .*raise max_sequence_length"):
        data.setup()


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
