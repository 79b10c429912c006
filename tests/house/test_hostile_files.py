"""A file made by somebody else runs no code, writes nowhere, fills no memory, and is answered with one sentence.

Each case bends one file of something that was whole: a model, a tokenizer, a checkpoint, a run, a recipe, a cache, a
table. What a bent file does is asked of every reader that users call, and of the program.
"""

import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from bertlab.cli.demo import load_recipe
from bertlab.cli.finetune import _read_runs
from bertlab.cli.main import main
from bertlab.cli.pretrain import find_model_directory, trainer_options
from bertlab.core.names import import_object
from bertlab.core.serialization import load_yaml
from bertlab.data.readers import TABLES, read_texts
from bertlab.data.sources import iter_documents
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.finetuning.data import load_reading
from bertlab.finetuning.predictions import load_predictor
from bertlab.finetuning.task_models import TaskLabels, load_task_model
from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import from_huggingface, read_config, save_model
from bertlab.model.loading import load_state_dict, read_torch_file, read_state_dict
from bertlab.optim.optimizers import get_optimizer
from bertlab.train.checkpoints import check_resume, latest_checkpoint, read_checkpoint
from bertlab.train.histograms import read_histograms
from bertlab.train.model_directories import ModelShelf, read_marker, remove_model
from bertlab.train.modules import PretrainingModule, load_encoder
from bertlab.train.stages import load_stages, run_stages
from bertlab.train.trainer import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["".join(random.Random(n).choices("abcdefgh", k=2 + n % 4)) for n in range(120)]
TEXTS = [" ".join(random.Random(n).choices(WORDS, k=12)) + "." for n in range(80)]
SHAPE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             max_position_embeddings=64)  # fmt: skip


class Trap:
    "Runs code when it is unpickled."

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


# ---- what was whole -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A model of transformers, a classifier, one of ours, each with its tokenizer; and a run of four steps."
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = train_tokenizer(TEXTS, 200)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SHAPE)
    for name, kind in (("theirs", BertForMaskedLM), ("classifier", BertForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    own = BertLabForMaskedLM(modernbert_tiny(vocab_size=len(tokenizer), norm="rms", **SHAPE))
    save_model(own, tokenizer, folder / "ours")
    (folder / "text.txt").write_text("\n".join(TEXTS) + "\n")
    model = json.dumps({k: v for k, v in SHAPE.items()})
    words = ["--data.train_dataset_name_or_path", str(folder / "text.txt"), "--data.max_sequence_length", "32",
             "--data.train_batch_size", "4", "--model.model_config_kwargs", model, "--run.vocab_size", "200",
             "--trainer.max_steps", "4", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
             "--run.progress", "none", "--run.output", str(folder / "run")]  # fmt: skip
    assert main(["pretrain", *words]) == 0
    return folder


@pytest.fixture
def place(whole, tmp_path):
    "A copy of all that, which a test may bend."
    return Path(shutil.copytree(whole, tmp_path / "given", symlinks=True))


def contents(folder):
    "Every name under a folder, and what is in it."
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def answer_of(work, sprung=None):
    "The one sentence with which something is refused, soon, and without running what was laid out."
    began, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError)) as caught:
        work()
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence.strip() and len(sentence) < 1000, sentence
    assert sprung is None or not Path(sprung).exists(), "code of a stranger was run"
    assert time.monotonic() - began < 60
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 2_000_000, f"{grown / 1e6:.1f} GB were filled"  # ru_maxrss is in kilobytes
    return sentence


def answer_of_program(capfd, *words):
    "The line with which the program refuses."
    capfd.readouterr()
    assert main(list(map(str, words))) == 2
    line = capfd.readouterr().err.strip()
    last = line.splitlines()[-1]
    assert last.startswith(f"bertlab {words[0]}: ") and "Traceback" not in line
    return last


# ---- models ---------------------------------------------------------------------------------------


def rewrite(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "gone"}))


def tensors_of(place):
    from safetensors.torch import load_file

    return load_file(place / "model.safetensors")


def put_tensors(place, change):
    from safetensors.torch import save_file

    tensors = {name: tensor.clone() for name, tensor in tensors_of(place).items()}
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def put_header(place, length=None, **entry):
    "A safetensors file whose header says something else than the file holds."
    data = (place / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if "embeddings" in name)
    header[name].update(entry)
    new = json.dumps(header).encode()
    (place / "model.safetensors").write_bytes(
        struct.pack("<Q", len(new) if length is None else length) + new + data[8 + size :])  # fmt: skip


def put_pickled(place, compress=False):
    state = {**tensors_of(place), "trap": Trap(place / "was run")}
    (place / "model.safetensors").unlink()
    torch.save(state, place / "pytorch_model.bin")


def put_zip_bomb(path, num_bytes=1 << 27):
    "A file of torch whose numbers are zeros, packed: a thousand times what it weighs, or any number of times."
    small = path.with_suffix(".small")
    torch.save({"state_dict": {"a": torch.zeros(10)}, "global_step": 1}, small)
    with zipfile.ZipFile(small) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            with new.open(part.filename, "w", force_zip64=True) as file:
                if not part.filename.endswith("data/0"):
                    file.write(old.read(part.filename))
                    continue
                for _ in range(num_bytes >> 24):
                    file.write(bytes(1 << 24))
    small.unlink()


def put_code(place):
    (place / "strange.py").write_text(f"import os; os.mkdir({str(place / 'was run')!r})")
    names = {"AutoConfig": "strange.C", "AutoModel": "strange.M", "AutoModelForMaskedLM": "strange.M",
             "AutoModelForSequenceClassification": "strange.M"}  # fmt: skip
    rewrite(place / "config.json", model_type="strange", auto_map=names)


def put_index(place, file):
    (place / "model.safetensors").rename(place.parent / "outside.safetensors")
    names = dict.fromkeys(tensors_of_file(place.parent / "outside.safetensors"), file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def tensors_of_file(path):
    from safetensors.torch import load_file

    return load_file(path)


def nan_in(tensors):
    first = next(name for name in tensors if name.endswith("weight"))
    tensors[first].view(-1)[3] = float("nan")


def config_of(place):
    return place / "config.json"


MODELS = {  # what is wrong with a directory: what makes it so
    "a width that no machine has": lambda p: rewrite(config_of(p), hidden_size=10**9, num_attention_heads=1),
    "a width that fills this machine": lambda p: rewrite(config_of(p), hidden_size=900_000, intermediate_size=900_000),
    "a thousand million layers": lambda p: rewrite(config_of(p), num_hidden_layers=10**9),
    "a thousand million words": lambda p: rewrite(config_of(p), vocab_size=10**12),
    "a thousand million labels": lambda p: rewrite(config_of(p), num_labels=10**9, id2label="gone", label2id="gone"),
    "a negative width": lambda p: rewrite(config_of(p), hidden_size=-16),
    "an infinite width": lambda p: config_of(p).write_text(config_of(p).read_text().replace(
        '"hidden_size": 16', '"hidden_size": Infinity')),
    "a width that is no number": lambda p: config_of(p).write_text(config_of(p).read_text().replace(
        '"hidden_size": 16', '"hidden_size": NaN')),
    "a width said twice": lambda p: config_of(p).write_text('{"hidden_size": 32,' + config_of(p).read_text().lstrip()[1:]),
    "a config that is a device": lambda p: (config_of(p).unlink(), config_of(p).symlink_to("/dev/zero")),
    "a config that is a directory": lambda p: (config_of(p).unlink(), config_of(p).mkdir()),
    "a kernel from elsewhere": lambda p: rewrite(config_of(p), _attn_implementation="some-body/kernels"),
    "code beside the model": put_code,
    "a header of 9 EB": lambda p: put_header(p, length=1 << 63),
    "a header longer than the file": lambda p: put_header(p, length=1 << 20),
    "a tensor of another shape": lambda p: put_header(p, shape=[3, 5]),
    "a tensor of another type": lambda p: put_header(p, dtype="F64"),
    "a tensor beyond the file": lambda p: put_header(p, data_offsets=[0, 1 << 50]),
    "a tensor that ends before it begins": lambda p: put_header(p, data_offsets=[800, 0]),
    "half of the weights": lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:9000]),
    "NaN among the weights": lambda p: put_tensors(p, nan_in),
    "infinity among the weights": lambda p: put_tensors(p, lambda t: next(iter(t.values())).view(-1)[:1].fill_(torch.inf)),
    "a layer less": lambda p: put_tensors(p, lambda t: [t.pop(n) for n in list(t) if ".1." in n]),
    "weights of another width": lambda p: put_tensors(p, lambda t: t.update(
        {n: v[..., :8].clone() for n, v in t.items() if v.dim() == 2})),
    "a pickle that runs code": put_pickled,
    "an index that leads elsewhere": lambda p: put_index(p, "../outside.safetensors"),
    "an index with a whole path": lambda p: put_index(p, str(p.parent / "outside.safetensors")),
    "an index to /etc": lambda p: put_index(p, "/etc/passwd"),
}  # fmt: skip
LABELS = TaskLabels(2, ("no", "yes"), "single_label_classification")
READERS = {  # who reads a directory with a model
    "from_huggingface": ("theirs", from_huggingface),
    "load_encoder": ("ours", load_encoder),
    "load_predictor": ("classifier", load_predictor),
    "load_task_model": ("theirs", lambda place: load_task_model("classification", place, LABELS)),
    "PretrainingModule": (
        "ours",
        lambda place: PretrainingModule(pretrained_model_name_or_path=str(place)),
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("wrong", MODELS)
def test_a_bent_model_is_one_sentence_for_every_reader(place, wrong, reader):
    name, read = READERS[reader]
    directory = place / name
    MODELS[wrong](directory)
    before = {path.name for path in place.rglob("*")}
    answer_of(lambda: read(directory), directory / "was run")
    assert {path.name for path in place.rglob("*")} == before


def test_what_is_whole_is_read_by_every_reader(place):
    "The control: none of the answers above is given to everybody."
    for name, read in READERS.values():
        read(place / name)
    assert read_state_dict(place / "theirs") and load_tokenizer(place / "ours")


@pytest.mark.parametrize("wrong", ["a width that fills this machine", "NaN among the weights", "code beside the model",
                                   "a header of 9 EB", "a bomb"])  # fmt: skip
def test_the_program_answers_a_bent_model_in_one_line(place, capfd, wrong):
    MODELS[wrong](place / "theirs")
    answer_of_program(capfd, "fill-mask", place / "theirs", "a [MASK] c")
    output = place.parent / "new"
    answer_of_program(capfd, "pretrain", "--model.pretrained_model_name_or_path", place / "theirs",
                      "--data.train_dataset_name_or_path", place / "text.txt", "--run.output", output)  # fmt: skip
    assert not output.exists() and not (place / "theirs" / "was run").exists()


def test_a_shape_alone_is_measured_before_anything_is_built(place):
    rewrite(
        place / "ours" / "config.json",
        hidden_size=10**5,
        num_attention_heads=100,
        intermediate_size=10**6,
    )
    assert "parameters" in answer_of(lambda: read_config(place / "ours"))


# ---- tokenizers -----------------------------------------------------------------------------------


def vocabulary(place, change):
    path = place / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tokenizer_code(place):
    (place / "strange.py").write_text(f"import os; os.mkdir({str(place / 'was run')!r})")
    rewrite(place / "tokenizer_config.json", auto_map={"AutoTokenizer": ["strange.T", "strange.T"]},
            tokenizer_class="Strange")  # fmt: skip
    (place / "tokenizer.json").unlink()


def first_word(content):
    return next(word for word in content["model"]["vocab"] if not word.startswith("["))


TOKENIZERS = {
    "cut": lambda p: (p / "tokenizer.json").write_text((p / "tokenizer.json").read_text()[:500]),
    "empty": lambda p: (p / "tokenizer.json").write_text(""),
    "a list": lambda p: (p / "tokenizer.json").write_text("[]"),
    "no bytes of UTF-8": lambda p: (p / "tokenizer.json").write_bytes(b"\xff\xfe{}"),
    "nested": lambda p: (p / "tokenizer.json").write_text('{"model": ' + "[" * 100_000),
    "an id far away": lambda p: vocabulary(p, lambda c: c["model"]["vocab"].update({first_word(c): 4_000_000})),
    "one id for two": lambda p: vocabulary(p, lambda c: c["model"]["vocab"].update({first_word(c): 7, "[UNK]": 7})),
    "a negative id": lambda p: vocabulary(p, lambda c: c["model"]["vocab"].update({first_word(c): -1})),
    "no model": lambda p: vocabulary(p, lambda c: c.update(model={"type": "Nothing"})),
    "code": tokenizer_code,
    "a config that is no mapping": lambda p: (p / "tokenizer_config.json").write_text("3"),
    "a special token that is a number": lambda p: rewrite(p / "tokenizer_config.json", mask_token=7),
    "no mask": lambda p: (rewrite(p / "tokenizer_config.json", mask_token="gone"),
                          rewrite(p / "special_tokens_map.json", mask_token="gone")
                          if (p / "special_tokens_map.json").exists() else None),
}  # fmt: skip


@pytest.mark.parametrize("wrong", TOKENIZERS)
def test_a_bent_tokenizer_is_one_sentence(place, wrong):
    directory = place / "theirs"
    TOKENIZERS[wrong](directory)
    try:
        answer_of(lambda: load_tokenizer(directory), directory / "was run")
    except (
        pytest.fail.Exception
    ):  # the library mends it, such as a mask that BERT always has: then it must work
        tokenizer = load_tokenizer(directory)
        ids = tokenizer(TEXTS[0])["input_ids"]
        assert wrong in ("no mask", "a special token that is a number")
        assert tokenizer.mask_token == "[MASK]" and 0 <= min(ids) <= max(ids) < len(tokenizer)
    assert not (directory / "was run").exists()


@pytest.mark.parametrize("read", [load_predictor, lambda place: PretrainingModule(
    pretrained_model_name_or_path=str(place))], ids=["load_predictor", "PretrainingModule"])  # fmt: skip
def test_a_vocabulary_that_is_larger_than_the_model_is_one_sentence(place, read):
    name = "classifier" if read is load_predictor else "theirs"
    train_tokenizer([" ".join(TEXTS), "x y z 0 1 2 3 4 5 6 7 8 9"], 400).save_pretrained(
        place / name
    )
    assert "vocab_size" in answer_of(lambda: read(place / name))


def test_a_gap_in_the_ids_makes_room_in_a_new_model(place):
    vocabulary(place / "theirs", lambda c: c["model"]["vocab"].update({first_word(c): 300}))
    tokenizer = load_tokenizer(place / "theirs")
    module = PretrainingModule(dict(SHAPE), pretrained_tokenizer_name_or_path=tokenizer)
    assert module.config.vocab_size == 301 > len(tokenizer)


# ---- checkpoints ----------------------------------------------------------------------------------


def checkpoint_of(place):
    return latest_checkpoint(place / "run" / "checkpoints")


def change_state(path, **changes):
    torch.save(
        {**read_torch_file(path), **changes}, path.with_suffix(".new")
    )  # the old one is mapped
    path.with_suffix(".new").replace(path)


def climbing(path):
    name = "ModelCheckpoint{'monitor': 'val_loss'}"
    outside = path.parent / ".." / ".." / "text.txt"
    change_state(path, callbacks={name: {"dirpath": str(path.parent), "best_model_path": str(outside),
                                         "best_k_models": {str(outside): torch.tensor(1.0)}}})  # fmt: skip


CHECKPOINTS = {
    "code": lambda p: change_state(p, trap=Trap(p.parent / "was run")),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:5000]),
    "text": lambda p: p.write_text("weights, honest"),
    "a plain pickle": lambda p: p.write_bytes(
        pickle.dumps({"global_step": 4, "trap": Trap(p.parent / "was run")})
    ),
    "a list": lambda p: torch.save([1, 2], p),
    "steps that are text": lambda p: change_state(p, global_step="many"),
    "steps below none": lambda p: change_state(p, global_step=-5),
    "weights that are a list": lambda p: change_state(p, state_dict=[1]),
    "callbacks that are a list": lambda p: change_state(p, callbacks=[1]),
    "a tensor without numbers": lambda p: change_state(
        p, extra=torch.zeros(1).expand(10**6, 10**6)
    ),
    "a path that climbs": climbing,
}


@pytest.mark.parametrize("wrong", CHECKPOINTS)
def test_a_bent_checkpoint_is_one_sentence_and_no_run_begins_anew_over_it(place, wrong):
    path = checkpoint_of(place)
    CHECKPOINTS[wrong](path)
    before = set(place.rglob("*"))
    answer_of(lambda: read_checkpoint(path), path.parent / "was run")
    assert "no checkpoint in " in answer_of(lambda: checkpoint_of(place), path.parent / "was run")
    trainer = make_trainer(8, "32-true", accelerator="cpu")
    module = PretrainingModule(dict(SHAPE, vocab_size=200))
    answer_of(lambda: trainer.fit(module, [], ckpt_path=path), path.parent / "was run")
    assert set(place.rglob("*")) == before


LATER = {  # what is read only when a run goes on: part, and what it becomes
    "random states of nobody": dict(rng_state=[{"python": 3}]),
    "random states that are text": dict(rng_state=["seed"]),
    "no weights": dict(state_dict={}),
    "weights by other names": dict(state_dict={"model.nothing": torch.zeros(3)}),
    "optimizer states of nothing": dict(optimizer_states=[{}]),
    "optimizer states that are text": dict(optimizer_states=["adam"]),
    "optimizer states of other shapes": dict(
        optimizer_states=[{"state": {0: {"step": "x"}}, "param_groups": []}]
    ),
    "loops of nobody": dict(loops={"fit_loop": 3}),
    "rows of nobody": dict(
        loops={"fit_loop": {"state_dict": {"combined_loader": [{"delivered": "all"}]}}}
    ),
    "rows without a number": dict(
        loops={"fit_loop": {"state_dict": {"combined_loader": [{"read": 3}]}}}
    ),
    "a schedule of nobody": dict(lr_schedulers=["later"]),
}


@pytest.mark.parametrize("wrong", LATER)
def test_a_run_does_not_go_on_from_parts_that_are_bent(place, wrong, capfd):
    for path in (place / "run" / "checkpoints").glob("*.ckpt"):
        change_state(path, **LATER[wrong])
    answer_of_program(capfd, "pretrain", "--resume", place / "run", "--trainer.max_steps", "6")


def test_a_checkpoint_of_a_module_is_loaded_without_code(place):
    path = checkpoint_of(place)
    change_state(path, trap=Trap(place / "was run"))
    with pytest.raises(Exception):  # of torch: the call is Lightning's own
        PretrainingModule.load_from_checkpoint(path, weights_only=True)
    assert not (place / "was run").exists()


def test_weights_of_a_bomb_are_not_unpacked(place):
    put_zip_bomb(place / "weights.bin")
    model = BertLabForMaskedLM(BertLabConfig(**SHAPE, vocab_size=50))
    assert "compressed" in answer_of(lambda: load_state_dict(model, place / "weights.bin"))


# ---- runs, shelves, histories ---------------------------------------------------------------------


def test_a_shelf_removes_nothing_that_a_marker_leads_to(place):
    step = place / "shelf" / "step-00000001"
    step.mkdir(parents=True)
    (place / "precious").write_text("mine")
    for files in (["../../precious"], [str(place / "precious")], [3], "precious", None):
        marker = {"step": 1, "value": 1.0, "files": files}
        (step / "bertlab-model.json").write_text(json.dumps(marker))
        assert read_marker(step) is None
        remove_model(step) if step.exists() else None
        step.mkdir(exist_ok=True)
        assert (place / "precious").read_text() == "mine"


@pytest.mark.parametrize("marker", ["[]", "{}", '{"step": "1", "value": 1, "files": []}', "[" * 10_000,
                                    '{"step": 1, "value": "low", "files": []}', '{"step": 1, "value": NaN, "files": []}'])  # fmt: skip
def test_a_marker_that_is_none_makes_no_model(place, marker):
    for model in (place / "run" / "models").glob("step-*"):
        (model / "bertlab-model.json").write_text(marker)
    assert not ModelShelf(place / "run" / "models").models()
    answer_of(lambda: find_model_directory(place / "run"))


def test_saving_over_a_link_leaves_what_it_leads_to(place):
    outside, model = place / "precious", load_encoder(place / "ours")
    outside.write_text("mine")
    for name in ("config.json", "tokenizer.json"):
        (place / "ours" / name).unlink()
        (place / "ours" / name).symlink_to(outside)
    save_model(model, load_tokenizer(place / "theirs"), place / "ours")
    assert outside.read_text() == "mine" and not (place / "ours" / "config.json").is_symlink()


NPZ = {
    "code": lambda p: np.savez(p, name=np.array([Trap(p.parent / "was run")], dtype=object)),
    "cut": lambda p: (np.savez(p, name=np.arange(100)), p.write_bytes(p.read_bytes()[:120])),
    "text": lambda p: p.write_text("name,step"),
    "other columns": lambda p: np.savez(p, nothing=np.arange(3)),
    "columns of two lengths": lambda p: np.savez(p, name=np.arange(3), step=np.arange(4)),
}


@pytest.mark.parametrize("wrong", NPZ)
def test_bent_histograms_are_one_sentence(tmp_path, wrong, monkeypatch):
    monkeypatch.setattr(
        "bertlab.train.histograms._MOST_BYTES", 1 << 20
    )  # else the bomb takes long to make
    NPZ[wrong](tmp_path / "histograms.npz")
    answer_of(lambda: read_histograms(tmp_path / "histograms.npz"), tmp_path / "was run")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"runs": 3}', '{"runs": [3]}', '{"runs": [{"val_loss": "low"}]}',
                                  '{"runs": [], "runs": [{}]}', '{"seeds": [0], "runs": []}', '{"seeds": [[]], "runs": [{}]}',
                                  "[" * 50_000])  # fmt: skip
def test_bent_results_of_fine_tuning_are_one_sentence(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    answer_of(lambda: _read_runs(tmp_path / "metrics.json", "val_loss"))


@pytest.mark.parametrize(
    "text", ["3", "{}", '{"task": 3, "text_columns": [], "max_sequence_length": 8}', "[" * 50_000]
)
def test_a_bent_note_of_how_rows_are_read_is_one_sentence(place, text):
    (place / "classifier" / "bertlab_reading.json").write_text(text)
    answer_of(lambda: load_reading(place / "classifier"))


# ---- recipes --------------------------------------------------------------------------------------


RECIPES = {
    "an object of Python": "data: !!python/object/apply:os.mkdir ['TRAP']",
    "a module of Python": "data: !!python/module:os",
    "a function of Python": "data: !!python/name:os.system",
    "an object with a state": "data: !!python/object/new:os.mkdir {args: ['TRAP']}",
    "a name twice": "steps: 3\nsteps: 4",
    "a tag that does not fit": "steps: !!int ''",
    "a day that is none": "data: !!timestamp 2020-99-99",
    "an alias of nothing": "data: *nothing",
    "two documents": "steps: 3\n---\nsteps: 4",
    "no text": "\x00\x01\x02",
    "a list": "- a",
    "nothing": "",
}
RECIPE_READERS = {"load_yaml": load_yaml, "load_recipe": load_recipe, "load_stages": load_stages}


@pytest.mark.parametrize("reader", RECIPE_READERS)
@pytest.mark.parametrize("wrong", RECIPES)
def test_a_bent_recipe_is_one_sentence(tmp_path, wrong, reader):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES[wrong].replace("TRAP", str(tmp_path / "was run")))
    assert "recipe.yaml" in answer_of(lambda: RECIPE_READERS[reader](path), tmp_path / "was run")


@pytest.mark.parametrize("command", ["pretrain", "finetune", "demo", "distill", "validate"])
@pytest.mark.parametrize("wrong", ["an object of Python", "a name twice"])
def test_the_program_answers_a_bent_recipe_in_one_line(
    tmp_path, capfd, monkeypatch, command, wrong
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES[wrong].replace("TRAP", str(tmp_path / "was run")))
    line = answer_of_program(capfd, command, *([] if command == "distill" else ["--config"]), path)
    assert "recipe.yaml" in line and sorted(os.listdir(tmp_path)) == ["recipe.yaml"]


@pytest.mark.parametrize("text", ["[]", "stages: 3", "stages: [3]", "!!python/name:os.system"])
def test_a_run_of_stages_does_not_go_on_from_a_bent_note(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(text)
    (tmp_path / "stages.yaml").write_text(
        "stages: [{data: {train_dataset_name_or_path: nowhere.txt}, steps: 3}]"
    )
    stages = load_stages(tmp_path / "stages.yaml")
    answer_of(lambda: run_stages(stages, tmp_path / "run", resume=True))


TOOLS = {  # what a recipe may ask to have built
    "a program": {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "TRAP"]}},
    "a shell": {"class_path": "os.system", "init_args": {"command": "touch TRAP"}},
    "a directory": {"class_path": "os.mkdir", "init_args": {"path": "TRAP"}},
    "a copy": {"class_path": "shutil.copyfile", "init_args": {"src": "/etc/hostname", "dst": "TRAP"}},
    "a path that writes": {"class_path": "pathlib.Path", "init_args": {}},
    "a compiler": {"class_path": "torch.utils.cpp_extension.load_inline", "init_args": {"name": "x", "cpp_sources": ""}},
    "a file of torch": {"class_path": "torch.load", "init_args": {"f": "TRAP"}},
    "a process of another library": {"class_path": "torch.multiprocessing.Process", "init_args": {}},
    "builtins": {"class_path": "builtins.exec", "init_args": {}},
    "inside of a callback": {"class_path": "lightning.pytorch.callbacks.Timer",
                             "init_args": {"duration": {"class_path": "os.mkdir", "init_args": {"path": "TRAP"}}}},
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_a_recipe_builds_parts_of_a_run_and_calls_nothing_else(tmp_path, tool):
    trap = tmp_path / "was run"
    asked = json.loads(json.dumps(TOOLS[tool]).replace("TRAP", str(trap)))
    answer_of(lambda: trainer_options({"callbacks": [asked]}), trap)
    answer_of(lambda: trainer_options({"logger": asked}), trap)


def test_parts_of_a_run_are_built_and_own_ones_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_watch.py").write_text(
        "from lightning.pytorch.callbacks import Callback\nclass Watch(Callback):\n    def __init__(self, n): self.n = n\n"
    )
    asked = [{"class_path": "own_watch.Watch", "init_args": {"n": 3}}, "LearningRateMonitor"]
    built = trainer_options({"callbacks": asked})["callbacks"]
    assert built[0].n == 3 and type(built[1]).__name__ == "LearningRateMonitor"


@pytest.mark.parametrize(
    "name", ["os.system", "subprocess.run", "builtins.eval", "shutil.rmtree", "runpy.run_path"]
)
def test_no_part_of_a_run_is_one_of_pythons_tools(name):
    for work in (
        lambda: import_object(name, "collator"),
        lambda: get_optimizer(name, [torch.nn.Parameter(torch.ones(2))]),
    ):
        assert name in answer_of(work)


# ---- texts and tables -----------------------------------------------------------------------------


def put_table(path, kind):
    import pyarrow
    from pyarrow import feather, parquet

    table = pyarrow.table({"text": TEXTS * 20})
    (parquet.write_table if kind == "parquet" else feather.write_feather)(table, str(path))


@pytest.mark.parametrize("kind", [".csv", ".jsonl", ".json", ".parquet", ".arrow"])
@pytest.mark.parametrize("seed", range(4))
def test_a_table_with_random_damage_is_read_or_answered(tmp_path, kind, seed):
    path, draw = tmp_path / f"table{kind}", random.Random(seed)
    if kind in (".parquet", ".arrow"):
        put_table(path, kind[1:])
    else:
        rows = [json.dumps({"text": text}) for text in TEXTS]
        path.write_text({".csv": "text\n" + "\n".join(f'"{t}"' for t in TEXTS), ".jsonl": "\n".join(rows),
                         ".json": f"[{','.join(rows)}]"}[kind])  # fmt: skip
    data = path.read_bytes()
    for _ in range(25):
        bent = bytearray(data)
        for _ in range(draw.choice([1, 3, 30])):
            bent[draw.randrange(len(bent))] = draw.randrange(256)
        path.write_bytes(bent[: draw.choice([len(bent), len(bent) // 2])])
        try:
            texts = [text for _, text in read_texts(path, "text")]
        except (ValueError, OSError) as error:
            assert "\n" not in str(error).strip()
        else:
            assert all(isinstance(text, str) for text in texts)


@pytest.mark.parametrize("name, content", [
    ("a.json", "[" * 100_000), ("a.jsonl", "[" * 100_000), ("a.json", '[{"text": 1e999999}]'), ("a.csv", '"text\nx'),
    ("a.json", '{"data": {"a": 1}}'), ("a.parquet", "PAR1"), ("a.arrow", "ARROW1\0\0"), ("a.json", '[{"text": "\\ud800"}]'),
])  # fmt: skip
def test_a_bent_table_is_one_sentence(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    answer_of(lambda: [text for _, text in read_texts(tmp_path / name, "text")])


def test_every_kind_of_table_is_tried():
    assert set(TABLES) == {".csv", ".tsv", ".parquet", ".arrow", ".json", ".jsonl", ".ndjson"}


@pytest.mark.parametrize("script", ["dataset.py", "given.py"])
def test_a_directory_of_data_runs_no_script(tmp_path, script):
    from collections import Counter

    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "README.md").write_text("---\nconfigs: []\n---\n")
    (folder / script).write_text(f"import os; os.mkdir({str(tmp_path / 'was run')!r})")
    answer_of(
        lambda: list(iter_documents(str(folder), "text", "auto", Counter())), tmp_path / "was run"
    )


# ---- the readers themselves -----------------------------------------------------------------------


# ---- a directory that is replaced -----------------------------------------------------------------


def test_a_model_whose_replacement_was_killed_is_read_again(place):
    model = load_encoder(place / "ours")
    (place / "ours").rename(place / ".ours.replaced")  # what a kill between two renames leaves
    again = load_encoder(place / "ours")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values())
    )


def test_save_model_replaces_a_model_whole_and_keeps_where_the_process_stands(place, monkeypatch):
    model, tokenizer = load_encoder(place / "ours"), load_tokenizer(place / "ours")
    inode = (place / "ours").stat().st_ino
    (place / "ours" / "NOTES.md").write_text("mine")
    monkeypatch.chdir(place / "ours")
    save_model(model, tokenizer, ".")
    assert (place / "ours").stat().st_ino != inode and Path("NOTES.md").read_text() == "mine"
    assert (
        Path("config.json").exists()
        and sorted(p.name for p in place.iterdir() if p.name[0] == ".") == []
    )


def test_a_place_that_cannot_move_is_written_file_by_file(place, monkeypatch):
    import errno

    def busy(*paths):
        raise OSError(errno.EBUSY, "a mounted drive")

    monkeypatch.setattr(Path, "rename", busy)
    model = load_encoder(place / "ours")
    (place / "ours" / "config.json").write_text("{}")
    (place / "ours" / "NOTES.md").write_text("mine")
    save_model(model, load_tokenizer(place / "ours"), place / "ours")
    assert load_encoder(place / "ours") and (place / "ours" / "NOTES.md").read_text() == "mine"
    assert not list(place.glob(".*"))


def test_a_checkpoint_takes_only_a_model_with_it_when_it_goes(place):
    from bertlab.train.modules import HuggingFaceCheckpointIO

    class Inner:
        def remove_checkpoint(self, path):
            pass

    beside = HuggingFaceCheckpointIO.__new__(HuggingFaceCheckpointIO)
    beside._checkpoint_io = Inner()
    (place / "texts").mkdir()
    (place / "texts" / "mine.txt").write_text("mine")
    for path in (place / "texts.ckpt", place / "theirs"):
        beside.remove_checkpoint(path)
    assert (place / "texts" / "mine.txt").exists() and (place / "theirs" / "config.json").exists()
    beside.remove_checkpoint(place / "theirs.ckpt")
    assert not (place / "theirs").exists()


def test_a_checkpoint_of_another_shape_is_refused_before_training(place):
    module = PretrainingModule(dict(SHAPE, vocab_size=200, hidden_size=32))
    answer_of(lambda: check_resume(checkpoint_of(place), module, None, 9))


# ---- ONNX files -----------------------------------------------------------------------------------

onnx = pytest.importorskip("onnx")


@pytest.fixture
def graph(place):
    "A model of two operations with the inputs of ours, beside the tokenizer of `theirs`: whole, before it is bent."
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    table = numpy_helper.from_array(rng.normal(size=(200, 8)).astype(np.float32), "table")
    head = numpy_helper.from_array(rng.normal(size=(8, 200)).astype(np.float32), "head")
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x"]),
             helper.make_node("MatMul", ["x", "head"], ["logits"])]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "L", 200])]
    made = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, [table, head]),
                             opset_imports=[helper.make_opsetid("", 20)], ir_version=10)  # fmt: skip
    from bertlab.train.export import OnnxModel

    write_graph(place, made)
    assert len(OnnxModel.load(place / "theirs", "fp32").fill(["a [MASK]"], 3)[0][0]) == 3
    return made


def write_graph(place, graph):
    (place / "theirs/model.onnx").write_bytes(graph.SerializeToString())


def open_graph(place):
    from bertlab.train.export import OnnxModel

    return OnnxModel.load(place / "theirs", "fp32").fill(["a [MASK] b"])


def point_elsewhere(tensor, location):
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def hidden_tensor(graph, where):
    "A weight somewhere in the file: beside the graph, in an attribute, a branch, a function, a sparse weight."
    from onnx import TensorProto, helper

    small = helper.make_tensor(
        "small", TensorProto.FLOAT, [2], np.zeros(2, np.float32).tobytes(), raw=True
    )
    constant = helper.make_node("Constant", [], ["small_out"], value=small)
    if where == "weights":
        return graph.graph.initializer[0]
    if where == "attribute":
        graph.graph.node.append(constant)
        return graph.graph.node[-1].attribute[0].t
    if where == "branch":
        inner = helper.make_graph(
            [constant], "inner", [], [helper.make_tensor_value_info("small_out", 1, [2])]
        )
        graph.graph.node.append(
            helper.make_node("If", ["attention_mask"], ["y"], then_branch=inner, else_branch=inner)
        )
        return graph.graph.node[-1].attribute[0].g.node[0].attribute[0].t
    if where == "function":
        function = helper.make_function(
            "own", "f", [], ["small_out"], [constant], [helper.make_opsetid("", 20)]
        )
        graph.functions.append(function)
        return graph.functions[0].node[0].attribute[0].t
    graph.graph.sparse_initializer.add().values.CopyFrom(small)
    return graph.graph.sparse_initializer[0].values


@pytest.mark.parametrize("where", ["weights", "attribute", "branch", "function", "sparse weight"])
@pytest.mark.parametrize("location", ["../secret", "{place}/secret", "secret", ""])
def test_an_onnx_file_that_names_another_file_is_refused_and_that_file_is_not_opened(
    graph, place, where, location
):
    # Whoever opens a pipe that nobody writes to waits for ever.
    for secret in (place / "secret", place / "theirs/secret"):
        os.mkfifo(secret)
    point_elsewhere(hidden_tensor(graph, where), location.format(place=place))
    write_graph(place, graph)
    assert "another file" in answer_of(lambda: open_graph(place))


@pytest.mark.parametrize("content", [b"", b"\x08", b"Dear reader", b"\x80\x04" + pickle.dumps(Trap("sprung"))[2:],
                                     b"PK\x03\x04", b"\xff" * 5000, b"\n" * 100_000], ids=range(7))  # fmt: skip
def test_what_is_no_onnx_file_is_answered_with_one_sentence(graph, place, content, monkeypatch):
    monkeypatch.chdir(place)
    (place / "theirs/model.onnx").write_bytes(content)
    assert "model.onnx" in answer_of(lambda: open_graph(place), place / "sprung")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_onnx_file_is_answered_with_one_sentence(graph, place, share):
    whole = graph.SerializeToString()
    (place / "theirs/model.onnx").write_bytes(whole[: int(share * len(whole))])
    assert "model.onnx" in answer_of(lambda: open_graph(place))


def bend_graph(graph, how):
    first = graph.graph.initializer[0]
    if how == "weights that are not all there":
        first.raw_data = first.raw_data[:100]
    elif how == "a weight larger than any memory":
        first.dims[0] = 10**15
    elif how == "an operation that nobody has":
        graph.graph.node[1].op_type = "RunThis"
    elif how == "an operation of a stranger's library":
        graph.graph.node[1].domain = "com.stranger"
    elif how == "an input that is not there":
        graph.graph.node[1].input[0] = "nothing"
    elif how == "a circle":
        graph.graph.node[0].input[0] = "logits"
    elif how == "other inputs":
        graph.graph.input[1].name = "images"
    elif how == "no scores":
        graph.graph.output[0].name = graph.graph.node[1].output[0] = "pixels"
    elif how == "no graph":
        graph.ClearField("graph")
    elif how == "a version of the future":
        graph.ir_version = 10**6


@pytest.mark.parametrize("how", [
    "weights that are not all there", "a weight larger than any memory", "an operation that nobody has",
    "an operation of a stranger's library", "an input that is not there", "a circle", "other inputs", "no scores",
    "no graph", "a version of the future",
])  # fmt: skip
def test_an_onnx_file_that_makes_no_sense_is_answered_with_one_sentence(graph, place, how):
    bend_graph(graph, how)
    write_graph(place, graph)
    assert "model.onnx" in answer_of(lambda: open_graph(place))


def test_flipped_bits_of_an_onnx_file_end_in_an_answer_or_in_a_sentence(graph, place):
    rng, whole, refused = random.Random(0), graph.SerializeToString(), 0
    for _ in range(60):
        bent = bytearray(whole)
        for _ in range(rng.choice([1, 4])):
            place_of_bit = rng.choice(
                [rng.randrange(len(bent)), rng.randrange(300), len(bent) - 1 - rng.randrange(300)]
            )
            bent[place_of_bit] ^= 1 << rng.randrange(8)
        (place / "theirs/model.onnx").write_bytes(bent)
        try:
            open_graph(place)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 0


def test_a_directory_of_onnx_names_no_file_elsewhere(graph, place):
    rewrite(place / "theirs/config.json", max_position_embeddings=-3)
    assert "max_position_embeddings" in answer_of(lambda: open_graph(place))
    rewrite(place / "theirs/config.json", max_position_embeddings="many")
    answer_of(lambda: open_graph(place))
    shutil.rmtree(place / "theirs/model.onnx", ignore_errors=True)
    (place / "theirs/model.onnx").unlink()
    os.mkfifo(place / "theirs/model.onnx")
    assert "model.onnx" in answer_of(lambda: open_graph(place))
