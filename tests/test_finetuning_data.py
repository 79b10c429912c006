"From labelled data of many forms to batches: no row twice, no row lost, the same again after a stop."

import csv
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.corpus import train_tokenizer
from bertlab.finetuning_data import FinetuningDataModule
from bertlab.labelled import LabelNames, hold_out_texts
from bertlab.loaders import EpochBatches

many = settings(max_examples=100, deadline=None, derandomize=True)
pytestmark = pytest.mark.filterwarnings("ignore:there is no validation split")


@functools.cache
def tokenizer():
    return train_tokenizer([f"text number {i} is good or bad" for i in range(60)], 80)


def rows_of(n: int, labels=("bad", "good")) -> list[dict]:
    return [{"text": f"text number {i} " + "is good " * (i % 7), "label": labels[i % len(labels)]} for i in range(n)]


def module(task="classification", source=None, **options):
    options = {"max_sequence_length": 64, "train_batch_size": 4, "val_batch_size": 4, "test_batch_size": 4, **options}
    return FinetuningDataModule(task, tokenizer(), source, **options)


def given_rows(train, val=None, test=None, task="classification", **options):
    data = module(task, **options)
    data.set_datasets(train=train, val=val, test=test)
    data.setup()
    return data


def texts(batch) -> list[str]:
    return [tokenizer().decode(ids[mask > 0], skip_special_tokens=True) for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]


# --- where data comes from ------------------------------------------------------------------------


def write(path, rows):
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_file_of_any_kind_gives_the_same_batches(suffix, tmp_path):
    rows = rows_of(20, ("NA", "null"))  # words that a table's reader would take for nothing
    write(tmp_path / f"rows.{suffix}", rows)
    from_file = module(source=str(tmp_path / f"rows.{suffix}"))
    from_file.setup()
    in_memory = given_rows(rows)
    assert from_file.id2label == {0: "NA", 1: "null"}
    for ours, theirs in zip(from_file.train_dataloader(), in_memory.train_dataloader()):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_directory_with_a_file_for_each_split_is_read_by_split(tmp_path):
    for split, n in {"train": 12, "validation": 5, "test": 3}.items():
        write(tmp_path / f"{split}.csv", rows_of(n))
    data = module(source=str(tmp_path))
    data.prepare_data()
    data.setup()
    assert {split: len(rows) for split, rows in data.datasets.items()} == {"train": 12, "validation": 5, "test": 3}
    assert data.note == ""


def test_a_directory_in_hub_form_has_configs_and_names_its_labels(tmp_path):
    for config, n in {"short": 6, "long": 10}.items():
        (tmp_path / config).mkdir()
        write(tmp_path / config / "train.jsonl", rows_of(n, (1, 0)))
    configs = "".join(f"- config_name: {c}\n  data_files: {c}/*.jsonl\n" for c in ("short", "long"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    data = module(source=str(tmp_path), dataset_config_name="long", validation_fraction=0.2)
    data.setup()
    assert len(data.records["train"]) + len(data.records["validation"]) == 10
    assert data.label2id == {"0": 0, "1": 1} and data.num_labels == 2


def test_a_saved_dataset_keeps_the_names_and_the_order_of_its_labels(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["up", "down", "never"])})
    rows = datasets.Dataset.from_list(rows_of(10, (0, 1)), features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    data = module(source=str(tmp_path / "saved"))
    data.setup()
    assert data.id2label == {0: "up", 1: "down", 2: "never"}, "a label of the list may be missing in the rows"


def test_slices_take_the_rows_that_they_name(tmp_path):
    write(tmp_path / "train.csv", rows_of(20))
    data = module(source=str(tmp_path), train_split="train[:50%]", val_split="train[15:]", test_split="train[10:12]+train[:1]")
    data.setup()
    text = lambda split: [row["text"] for row in data.records[split]]
    every = [row["text"] for row in rows_of(20)]
    assert text("train") == every[:10] and text("validation") == every[15:] and text("test") == every[10:12] + every[:1]


@pytest.mark.parametrize("split", ["train_split", "val_split", "test_split"])
def test_a_split_that_does_not_exist_is_named_with_those_that_do(split, tmp_path):
    write(tmp_path / "train.csv", rows_of(6))
    with pytest.raises(ValueError, match=r"no split 'dev'; there are \['train'\]"):
        module(source=str(tmp_path), **{split: "dev[:3]"}).setup()


@pytest.mark.parametrize("name", ["no/such/path", "missing.csv", "notes.txt"])
def test_a_source_that_is_none_is_refused(name, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="dataset_name_or_path"):
        module(source=str(tmp_path / name)).setup()


def test_no_source_at_all_is_refused():
    with pytest.raises(ValueError, match="set_datasets"):
        module().setup()


# --- what is held out -----------------------------------------------------------------------------


def test_a_missing_validation_split_is_held_out_by_seed_and_said():
    rows = rows_of(40)
    with pytest.warns(UserWarning, match="4 of 40 training rows are held out, by seed 3"):
        data = given_rows(rows, seed=3)
    held = [row["text"] for row in data.records["validation"]]
    assert len(held) == 4 and not set(held) & {row["text"] for row in data.records["train"]}
    assert held == [row["text"] for row in given_rows(rows, seed=3).records["validation"]]
    assert held != [row["text"] for row in given_rows(rows, seed=4).records["validation"]]
    assert "held out" in data.describe()


@many
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=2, max_size=40), st.integers(0, 5))
def test_no_text_stands_on_both_sides_and_training_keeps_every_label(pairs, seed):
    texts, labels = [text for text, _ in pairs], [[label] for _, label in pairs]
    try:
        kept, held = hold_out_texts(texts, labels, 0.2, seed)
    except ValueError:
        return
    assert sorted(kept + held) == list(range(len(pairs))) and held
    assert not {texts[i] for i in kept} & {texts[i] for i in held}
    assert {labels[i][0] for i in kept} == {label for _, label in pairs}


def test_questions_on_one_context_stay_together():
    rows = [question(i, f"Context {i % 5} is good.") for i in range(30)]
    data = given_rows(rows, task="question_answering", validation_fraction=0.2, collator_kwargs={"doc_stride": 4})
    sides = [{row["context"] for row in data.records[split]} for split in ("train", "validation")]
    assert len(sides[1]) == 1 and not sides[0] & sides[1]


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels, names, num_labels",
    [(("z", "a", "m"), {0: "a", 1: "m", 2: "z"}, 3), ((5, 1, 3), {0: "1", 1: "3", 2: "5"}, 3), ((True, False), {0: "False", 1: "True"}, 2)],
)
def test_names_and_ids_are_sorted_and_numbered_from_0(labels, names, num_labels):
    data = given_rows(rows_of(12, labels), rows_of(3, labels))
    assert (data.id2label, data.num_labels) == (names, num_labels)
    assert data.label2id == {name: number for number, name in names.items()}
    batch = next(iter(data.val_dataloader()))
    assert [names[number] for number in batch["labels"][:3].tolist()] == [str(label) for label in labels[:3]][: len(labels)] + [str(labels[0])] * (3 - len(labels))


def test_fractions_are_regressed_and_lists_are_several_labels():
    amounts = given_rows(rows_of(8, (0.5, 2.5)), rows_of(2, (0.5, 2.5)))
    batch = next(iter(amounts.val_dataloader()))
    assert amounts.collator.problem_type == "regression" and batch["labels"][:2].tolist() == [0.5, 2.5]
    several = given_rows(rows_of(8, (["b", "a"], ["c"])), rows_of(2, (["b"], [])))
    batch = next(iter(several.val_dataloader()))
    assert batch["labels"][:2].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert several.id2label == {0: "a", 1: "b", 2: "c"}


def test_word_labels_are_numbered_and_minus_100_stays():
    rows = [{"text": ["text", "is", "good"], "label": ["O", "B", "I"]}, {"text": ["bad"], "label": ["O"]}] * 3
    data = given_rows(rows, rows[:2], task="token_classification")
    assert data.id2label == {0: "B", 1: "I", 2: "O"}
    assert next(iter(data.val_dataloader()))["labels"][0][:5].tolist() == [-100, 2, 0, 1, -100]
    ids = [{**row, "label": [-100 if label == "O" else 7 for label in row["label"]]} for row in rows]
    data = given_rows(ids, ids[:2], task="token_classification")
    assert data.id2label == {0: "7"}
    assert next(iter(data.val_dataloader()))["labels"][0][:5].tolist() == [-100, -100, 0, 0, -100]


def test_a_validation_label_not_seen_in_training_is_named_with_its_row():
    with pytest.raises(ValueError, match="validation row 1: 'label' has the label 'ugly'.* 'bad', 'good'"):
        given_rows(rows_of(8), [*rows_of(1), {"text": "text", "label": "ugly"}])


def test_labels_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="int and str"):
        given_rows(rows_of(8, (1, "good")), rows_of(2))


@pytest.mark.parametrize("test", [[{"text": "text is good"}], [{"text": "text is good", "label": -1}]])
def test_a_test_split_may_have_no_labels(test):
    data = given_rows(rows_of(8), rows_of(2), test)
    batch = next(iter(data.test_dataloader()))
    assert "labels" not in batch and texts(batch)[0] == "text is good"


def test_names_by_a_feature_are_found_inside_a_sequence():
    import datasets

    feature = datasets.Sequence(datasets.ClassLabel(names=["O", "B"]))
    assert LabelNames.of([0, 0], feature).names == ("O", "B")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, words",
    [
        ({"label": "bad"}, ["'text'"]),
        ({"text": "good"}, ["'label'"]),
        ({"text": " ", "label": "bad"}, ["'text'", "empty"]),
        ({"text": None, "label": "bad"}, ["'text'"]),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bad_row_is_named_by_split_row_and_column(row, words, split):
    splits = {"train": rows_of(8), "val": rows_of(4)}
    splits[split] = [*splits[split][:3], row]
    with pytest.raises(ValueError) as error:
        given_rows(**splits)
    name = "validation" if split == "val" else split
    assert all(word in str(error.value) for word in [f"{name} row 3", *words]), error.value


def test_row_numbers_go_on_beyond_a_thousand():
    rows = rows_of(1203)
    rows[1201]["text"] = ""
    with pytest.raises(ValueError, match="train row 1201"):
        given_rows(rows, rows[:2])


def test_an_unknown_task_lists_the_known_and_a_small_epoch_says_so():
    with pytest.raises(ValueError, match="token_classification"):
        module("translation")
    with pytest.raises(ValueError, match="train_batch_size"):
        given_rows(rows_of(3), rows_of(2)).train_dataloader()
    with pytest.raises(ValueError, match="too few"):
        given_rows(rows_of(1))


# --- batches --------------------------------------------------------------------------------------


def epoch_of(data, epoch=0, rank=0, world_size=1):
    data._place = lambda: (rank, world_size)
    loader = data.train_dataloader()
    loader.load_state_dict({"delivered": epoch * len(loader)})
    return [batch for batch, _ in zip(loader, range(len(loader)))]


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order():
    data = given_rows(rows_of(40), rows_of(2))
    first, again, second = ([text for batch in epoch_of(data, epoch) for text in texts(batch)] for epoch in (0, 0, 1))
    assert first == again != second
    assert sorted(first) == sorted(second) and len(set(first)) == 40


def test_without_shuffling_rows_come_as_they_are():
    data = given_rows(rows_of(8), rows_of(2), shuffle_train=False)
    assert [text for batch in epoch_of(data, 3) for text in texts(batch)] == [row["text"].strip() for row in rows_of(8)]


def test_batches_hold_rows_of_like_length_and_less_padding():
    rng = np.random.default_rng(0)
    rows = [{"text": "good " * n, "label": "ab"[n % 2]} for n in rng.integers(1, 50, 400)]
    data = given_rows(rows, rows[:2])
    padding = lambda batches: 1 - sum(b["attention_mask"].sum() for b in batches) / sum(b["attention_mask"].numel() for b in batches)
    grouped = epoch_of(data)
    data.shuffle_train = False
    assert padding(grouped) < padding(epoch_of(data)) / 3
    widths = [batch["input_ids"].shape[1] for batch in grouped]
    assert widths != sorted(widths) and all(width % 8 == 0 or width == 64 for width in widths)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_disjoint_rows_and_equally_many(world_size):
    data = given_rows(rows_of(50), rows_of(11))
    ranks = [epoch_of(data, 1, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    read = [text for batches in ranks for batch in batches for text in texts(batch)]
    assert len(read) == len(set(read)) == 50 // (4 * world_size) * 4 * world_size
    seen = []
    for rank in range(world_size):
        data._place = lambda rank=rank: (rank, world_size)
        batches = list(data.val_dataloader())
        assert len(batches) == -(-11 // (4 * world_size)) and all(len(batch["labels"]) == 4 for batch in batches)
        for batch in batches:
            blank = batch["attention_mask"].sum(1) == 0
            assert (batch["labels"][blank] == -100).all() and (batch["labels"][~blank] >= 0).all()
            seen += [text for text, empty in zip(texts(batch), blank) if not empty]
    assert sorted(seen) == sorted(row["text"].strip() for row in rows_of(11))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 7, 13])
def test_a_stopped_run_goes_on_with_the_very_next_batch(stop, num_workers):
    def first(loader, n):
        batches = []
        while len(batches) < n:
            batches += [batch["input_ids"] for batch, _ in zip(loader, range(n - len(batches)))]
        return batches

    data = given_rows(rows_of(24), rows_of(2), num_workers=num_workers)  # 6 batches an epoch
    whole = first(given_rows(rows_of(24), rows_of(2)).train_dataloader(), 16)
    loader = data.train_dataloader()
    assert isinstance(loader, EpochBatches)
    before, again = first(loader, stop), data.train_dataloader()
    again.load_state_dict({"delivered": stop})
    assert all(map(torch.equal, whole, before + first(again, 16 - stop)))


def test_fixed_shapes_are_fixed():
    data = given_rows(rows_of(24), rows_of(3), fixed_shapes=True)
    shapes = {tuple(batch["input_ids"].shape) for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader}
    assert shapes == {(4, 64)}


def question(i: int, context: str) -> dict:
    answers = {"text": ["good"], "answer_start": [context.index("good")]}
    return {"question": f"text number {i} ?", "context": context, "answers": answers}


def test_questions_become_windows_at_setup_and_batches_keep_their_size():
    rows = [question(i, "bad " * 3 * i + "good " + "is " * 20) for i in range(9)]
    data = given_rows(rows, rows, task="question_answering", max_sequence_length=32, collator_kwargs={"doc_stride": 6})
    assert len(data.datasets["train"]) > 12
    seen = []
    for batch in data.val_dataloader():
        assert len(batch["input_ids"]) == 4 and batch["offsets"].shape[-1] == 2
        for i, number in enumerate(batch["example_index"].tolist()):
            first, last = batch["start_positions"][i], batch["end_positions"][i]
            if number >= 0 and first > 0:
                a, b = batch["offsets"][i, first, 0], batch["offsets"][i, last, 1]
                assert rows[number]["context"][a:b] == "good"
                seen.append(number)
            if number < 0:
                assert first == -100 and (batch["offsets"][i] == -1).all() and batch["attention_mask"][i].sum() == 0
    assert sorted(set(seen)) == list(range(9))


def test_a_wrong_answer_is_named_with_split_and_row():
    rows = [question(i, "text is good") for i in range(3)]
    rows[2]["answers"] = {"text": ["good"], "answer_start": [3]}
    with pytest.raises(ValueError, match="train row 2: the column 'answers'.*first found at 8"):
        given_rows(rows, rows[:1], task="question_answering", collator_kwargs={"doc_stride": 4})


def test_pairs_reach_the_tokenizer_as_pairs():
    rows = [{"text": "text is good", "other": "number bad", "label": i % 2} for i in range(4)]
    data = given_rows(rows, rows, collator_kwargs={"text_pair_column": "other"})
    expected = tokenizer()("text is good", "number bad")["input_ids"]
    assert next(iter(data.val_dataloader()))["input_ids"][0, : len(expected)].tolist() == expected


def test_lightning_trains_on_it_and_resumes_in_mid_epoch(tmp_path):
    import lightning as L

    class Reader(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.read = torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch, batch_idx):
            self.read.append(batch["input_ids"].clone())
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(max_steps, path=None):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer, reader = L.Trainer(max_steps=max_steps, default_root_dir=tmp_path, enable_checkpointing=False, **quiet), Reader()
        trainer.fit(reader, given_rows(rows_of(24), rows_of(2)), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return reader.read

    whole, begun = fit(10), fit(4)
    assert all(map(torch.equal, whole, begun + fit(10, tmp_path / "4.ckpt")))


# --- describe -------------------------------------------------------------------------------------


def test_describe_counts_rows_labels_and_lengths_and_shows_rows():
    data = given_rows(rows_of(12, ("bad", "bad", "good")), rows_of(3))
    said = data.describe(num_rows=1)
    assert "train: 12 examples, 12 rows" in said and "validation: 3 examples" in said
    assert "bad: 8 (67%)" in said and "good: 4 (33%)" in said
    assert "| [CLS] text number 0" in said and said.count("|") == 1
    bars = [int(line.split()[3 if line.split()[1] == "-" else 2].replace(",", "")) for line in said.split("validation")[0].splitlines() if " -" in line]
    assert sum(bars) == 12
