"Files, flags and defaults become one configuration; a mistake is one line that names the option."

import re
import subprocess
import sys
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import pytest
from programs import users_environment

from bertlab.cli.commands import COMMANDS
from bertlab.cli.main import main
from bertlab.cli.parser import Command, configuration, parse, read_options
from bertlab.core.serialization import load_yaml

PRETRAIN = COMMANDS["pretrain"]
TEXT = "data.train_dataset_name_or_path"


def configured(*words, command="pretrain", base=None):
    return parse(COMMANDS[command], list(map(str, words)), base).config


@pytest.mark.parametrize(
    "source", sorted({s for c in COMMANDS.values() for s in (*c.sections.values(), c.function)})
)
def test_options_are_the_parameters_with_their_defaults(source):
    file, _, name = source.rpartition(":")
    package, _, path = file.rpartition(":")
    module = import_module(f"{package or 'bertlab'}.{path[:-3].replace('/', '.')}")
    parameters = {
        name: parameter
        for name, parameter in signature(getattr(module, name)).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name not in ("config", "overrides")
    }
    options = {option.name: option for option in read_options(source)}
    assert list(options) == list(parameters)
    for name, option in options.items():
        default = parameters[name].default
        assert option.required == (default is Parameter.empty)
        if not option.required:
            assert option.default == (list(default) if isinstance(default, tuple) else default)


HEAVY = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "lightning", "transformers", "numpy"):
            raise AssertionError(name)
sys.meta_path.insert(0, Blocked())
from importlib.util import find_spec
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: real(name, *a) if name != "lightning" else __import__("importlib.machinery").machinery.PathFinder.find_spec(name)
from bertlab.cli.main import main
from bertlab.cli.commands import COMMANDS
assert main(["--help"]) == 0
for name in COMMANDS:
    assert main([*name.split(), "--help"]) == 0
assert main(["pretrain", "--print_config"]) == 0
for line in sys.stdin.read().splitlines():
    assert main(line.split()) == 2, line
"""
WRONG = """\
pretrain --model.learning_rat 1
finetune --run.seeds many
pretrain none.txt
pretrain taken/a.txt --max_steps 0
pretrain taken/a.txt --val_every_steps 0
pretrain taken/a.txt --output taken
pretrain --model.pretrained_model_name_or_path ./none
finetune --data.dataset_name_or_path none.csv
finetune --data.dataset_name_or_path {train: none.csv}
predict ./none taken/a.txt
predict taken none.csv
fill-mask none [MASK]
tokenize none.txt --tokenizer taken
tokenizer train none.txt
tokenizer train taken/a.txt --output taken
tokenizer extend ./none new
tokenizer compare taken --output taken/a.txt
average taken none
average taken taken --output taken
lengthen none --length 64
export none
export taken --output taken
demo --data none.txt
demo --steps 0
tune none.yaml
distill none.yaml
embed encode taken none.txt
embed mine taken/a.txt ./none
"""


def test_help_and_mistakes_need_no_heavy_import(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a.txt").write_text("a")
    done = subprocess.run(
        [sys.executable, "-c", HEAVY],
        input=WRONG,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=users_environment(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    messages = done.stderr.splitlines()
    for line, message in zip(WRONG.splitlines(), messages, strict=True):
        words = re.findall(r"none|taken|learning_rat|many|[a-z_]*steps", line)
        assert any(word in message for word in words), message


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_no_names_of_the_source(name):
    for option in COMMANDS[name].options.values():
        internal = re.findall(
            r"\b[A-Z]+_[A-Z_]+\b|key of [A-Z]+|\bset_\w+|\b(?!my_file)\w+Config\b|`", option.help
        )
        assert not internal, (option.name, option.help)
    assert "%%" not in COMMANDS[name].help() and "None:" not in COMMANDS[name].help()


def example(type_: Any) -> Command:
    from bertlab.cli.parser import Option

    command = Command("example", "cli/export.py:export")
    command.__dict__["options"] = {"x": Option("x", type_)}
    return command


@pytest.mark.parametrize("text, type_, value", [
    ("3", int, 3), ("2e-3", float, 0.002), ("3", float, 3.0), (".inf", float, float("inf")),
    ("null", int | None, None), ("64K", int | str | None, "64K"), ("64", int | str | None, 64),
    ("true", bool | str, True), ("full", bool | str, "full"), ("no", str | list[str], "no"),
    ("007", str | None, "007"), ("[1, 2]", list[int], [1, 2]), ("{a: 2e-3}", dict[str, Any] | None, {"a": 0.002}),
    ("[a, b]", str | list[str] | None, ["a", "b"]), ("-1", int, -1), ("2020", str | list[str] | None, "2020"),
    ("no way", list[str] | None, ["no way"]), ("{class_path: a.B}", dict[str, Any] | str, {"class_path": "a.B"}),
    ("[MASK] here", list[str] | None, ["[MASK] here"]), ("{a: no}", Any, {"a": "no"}),
    # jsonargparse would make namespaces of classes that can be imported.
    ("[{class_path: fractions.Fraction, init_args: {numerator: 2}}]", list[Any] | Any,
     [{"class_path": "fractions.Fraction", "init_args": {"numerator": 2}}]),
])  # fmt: skip
def test_a_word_becomes_a_value_of_its_type(text, type_, value):
    result = parse(example(type_), ["--x", text]).config["x"]
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("text, type_", [("many", int), ("2.5", int), ("true", int), ("null", int), ("fast", float),
                                        ("a", list[int]), ("1", dict[str, int] | None)])  # fmt: skip
def test_a_value_of_another_type_is_refused(text, type_):
    with pytest.raises(ValueError, match=rf"x must be .*{text}"):
        parse(example(type_), ["--x", text])


def test_flags_win_over_files_and_later_files_over_earlier(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: {learning_rate: 2e-3, weight_decay: 1}\nrun: {output: here}\n"
    )
    (tmp_path / "b.yaml").write_text("model:\n  weight_decay: 2\ndata:\n")
    files = ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}"]
    for words in (["--model.weight_decay=3", *files], [*files, "--model.weight_decay=3"]):
        config = configured(*words)
        assert config["model"]["learning_rate"] == 0.002 and config["model"]["weight_decay"] == 3
        assert config["run"]["output"] == "here"
    assert configured(*files)["model"]["weight_decay"] == 2


@pytest.mark.parametrize(
    "words, text",
    [([], "of_file.txt"), (["mine.txt"], "mine.txt"), (["a.txt", "b.txt"], ["a.txt", "b.txt"])],
)
def test_a_positional_text_wins_over_files_and_the_resumed_run(tmp_path, words, text):
    content = {"data": {"train_dataset_name_or_path": "of_file.txt"}}
    (tmp_path / "a.yaml").write_text("data: {train_dataset_name_or_path: of_file.txt}\n")
    files = ["--config", str(tmp_path / "a.yaml")]
    for config in (
        configured(*words, *files),
        configured(*files, *words),
        configured(*words, base=content),
    ):
        assert config["data"]["train_dataset_name_or_path"] == text


def test_a_printed_configuration_gives_the_same_one(tmp_path, capsys):
    words = ["--run.vocab_size", "60", "--model.learning_rate", "2e-3"]
    assert main(["pretrain", "--print_config", *words]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    config = configuration(PRETRAIN, ["--config", str(tmp_path / "printed.yaml")])
    assert config == load_yaml(tmp_path / "printed.yaml") == configuration(PRETRAIN, words)
    assert config["model"]["learning_rate"] == 0.002 and config["run"]["vocab_size"] == 60


def test_a_plain_name_of_several_sections_is_the_models():
    tasks = configured("--task", "regression", command="finetune")
    assert (tasks["model"]["task"], tasks["run"]["task"]) == ("regression", None)


def test_entries_of_dictionaries_and_growing_lists():
    config = configured("--data.collator_kwargs", "{a: 1, b: 2}", "--data.collator_kwargs.b", "3",
                        "--model.model_kwargs.er", "x", "--trainer.callbacks+=one.A",
                        "--trainer.callbacks+", "{class_path: two.B}")  # fmt: skip
    assert config["data"]["collator_kwargs"] == {"a": 1, "b": 3}
    assert config["model"]["model_kwargs"] == {"er": "x"}
    assert config["trainer"]["callbacks"] == ["one.A", {"class_path": "two.B"}]
    callbacks = configured("--trainer.callbacks", "[{class_path: two.B}, one.A]")["trainer"][
        "callbacks"
    ]
    assert callbacks == [{"class_path": "two.B"}, "one.A"] and type(callbacks[0]) is dict
    adapter = configured(
        "--model.adapter", "{type: lora}", "--model.adapter.r", "8", command="finetune"
    )
    assert adapter["model"]["adapter"] == {"type": "lora", "r": 8}


def test_a_key_needs_no_name_of_its_dictionary():
    words = ["a.txt", "--encoding", "cp1252", "--stride=4", "--data.data_kwargs.min_chars", "3"]
    data = parse(COMMANDS["pretrain"], words).config["data"]
    assert data["data_kwargs"] == {"encoding": "cp1252", "stride": 4, "min_chars": 3}
    data = parse(COMMANDS["finetune"], ["a.csv", "--delimiter", ";"]).config["data"]
    assert data["reader_kwargs"] == {"delimiter": ";"}


def test_every_command_that_reads_files_takes_an_encoding():
    models = "card", "push", "export", "average", "lengthen", "fill-mask", "write"
    for name, command in COMMANDS.items():
        names = {option.rpartition(".")[2] for option in command.options} | command.keys.keys()
        reads = command.sources or command.local or any("dataset_name" in key for key in names)
        assert not reads or name in models or "encoding" in names, name


def test_list_flags_repeat():
    sentences = ["[MASK] is a cat.", "Note: the [MASK].", "2020"]
    words = [word for sentence in sentences for word in ("--run.preview_sentences", sentence)]
    assert configured(*words)["run"]["preview_sentences"] == sentences


def test_switches_and_resume():
    assert configured("--trainer.max_steps", "-1", "--resume")["resume"] is True
    assert (
        configured("--resume", "x", "--run.output", "y")["resume"]
        == "x"
        == configured("--resume=x")["resume"]
    )
    config = configured("--run.compile_ahead", "--overwrite", "text.txt")
    assert config["run"]["compile_ahead"] is config["overwrite"] is True
    assert config["data"]["train_dataset_name_or_path"] == "text.txt"
    plain = configured("--max_steps", "5", "--learning-rate=2e-3")  # no section: one option has it
    assert plain["trainer"]["max_steps"] == 5 and plain["model"]["learning_rate"] == 0.002
    demo = parse(COMMANDS["demo"], ["--resume", "--max-documents", "5"])
    assert demo.overrides == {"resume": True, "max_documents": 5}


@pytest.mark.parametrize("command, words, parts", [
    ("pretrain", ["--model.learning_rat", "1"], ["'model.learning_rat'", "did you mean 'model.learning_rate'"]),
    ("pretrain", ["--zzz", "1"], ["'zzz'"]),
    ("pretrain", ["--overwite"], ["did you mean 'overwrite'"]),
    ("pretrain", ["--model.learning_rate"], ["model.learning_rate", "value"]),
    ("pretrain", ["--data.seed", "1"], ["data.seed"]),
    ("validate", ["run", "other"], ["'other'"]),
    ("validate", ["run", "--run.output", "other"], ["run.output", "twice", "'run'"]),
    ("finetune", ["--trainer.max_steps", "3"], ["trainer.max_steps"]),
    ("demo", ["--lerning-rate", "1"], ["did you mean 'learning_rate'"]),
    ("demo", ["--batch-size", "many"], ["batch_size", "int", "'many'"]),
    ("predict", [], ["directory is missing"]),
    ("pretrain", ["--data.collator_kwargs", "3"], ["data.collator_kwargs", "'3'"]),
    ("fill-mask", ["d", "--top_q", "3"], ["did you mean 'top_k'"]),
    ("distill", ["s.yaml", "--run.output", "x"], ["run.output"]),
])  # fmt: skip
def test_a_mistake_names_option_and_value(command, words, parts):
    with pytest.raises(ValueError) as error:
        configured(*words, command=command)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize("text, part", [("model: {learning_rat: 1}", "learning_rate"), ("model: [1", "wrong.yaml"), ("- a", "wrong.yaml"),
                                        ("model: 3", "model"), ("modle: {a: 1}", "modle"), ("data: {seed: 3}", "data.seed"),
                                        ("run: {keep_last: x}", "run.keep_last")])  # fmt: skip
def test_a_mistake_in_a_file_names_the_file(tmp_path, text, part):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        configured("--config", tmp_path / "wrong.yaml")
    assert (
        "wrong.yaml" in str(error.value)
        and part in str(error.value)
        and "\n" not in str(error.value)
    )


def test_resuming_with_the_same_words_adds_nothing_twice(tmp_path):
    words = [f"--{TEXT}+", "b.txt", f"--{TEXT}+", "c.txt"]
    (tmp_path / "a.yaml").write_text("data: {train_dataset_name_or_path: [a.txt]}")
    file = ["--config", str(tmp_path / "a.yaml")]
    first = configuration(PRETRAIN, [*file, *words])
    assert first["data"]["train_dataset_name_or_path"] == ["a.txt", "b.txt", "c.txt"]
    for again in (words, [*file, *words]):
        config = configured(*again, base=first)
        assert {name: config[name] for name in first} == first
    longer = configured(*words, f"--{TEXT}+", "d.txt", base=first)
    assert longer["data"]["train_dataset_name_or_path"] == ["a.txt", "b.txt", "c.txt", "d.txt"]
