"What the command line knows is what the classes take, read without importing them."

import subprocess
import sys
import time
from importlib import import_module
from inspect import Parameter, signature

import pytest

from bertlab.cli.options import COMMANDS, LIGHTNING, convert, convert_text, read_options
from bertlab.core.serialization import load_yaml


def imported(file, name):
    module = (
        "lightning.pytorch.trainer.trainer"
        if file == LIGHTNING
        else f"bertlab.{file[:-3].replace('/', '.')}"
    )
    return getattr(import_module(module), name)


@pytest.mark.parametrize(
    "place", sorted({p for c in COMMANDS.values() for p in c.sections.values()})
)
def test_options_are_the_parameters_of_the_class_with_their_defaults(place):
    taken = {
        name: p
        for name, p in signature(imported(*place)).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }
    options = {option.name: option for option in read_options(*place)}
    assert list(options) == list(taken)
    for name, option in options.items():
        default = taken[name].default
        assert option.required == (default is Parameter.empty)
        if not option.required:
            assert option.default == (list(default) if isinstance(default, tuple) else default), (
                name
            )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_every_flag_has_a_word_of_help_and_its_choices(command):
    silent = [name for name, option in command.options().items() if not option.help]
    assert not silent
    for key in command.choices:
        assert len(command.known_names(key)) > 1, key
        assert all(name in " ".join(command.help().split()) for name in command.known_names(key))


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"],
                                   ["pretrain", "--print_config"], ["pretrain", "--model.learning_rat", "1"],
                                   ["finetune", "--run.seeds", "many"], ["demo", "--stepps", "3"]],
                         ids=" ".join)  # fmt: skip
def test_help_and_mistakes_are_answered_without_torch(words):
    code = (
        "import sys; from bertlab.cli.main import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules); sys.exit(status)"
    )
    start = time.perf_counter()
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert time.perf_counter() - start < 5, "far below a second where nobody else works"
    mistake = words[-1] not in ("--help", "--version", "--print_config")
    assert found.returncode == 2 * mistake, found.stderr
    assert found.stderr.count("\n") == mistake and bool(found.stdout) != mistake


@pytest.mark.parametrize("text, kind, value", [
    ("3", "int", 3), ("2e-3", "float", 0.002), ("3", "float", 3.0), (".inf", "float", float("inf")),
    ("null", "int | None", None), ("null", "str", "null"), ("64K", "int | str | None", "64K"),
    ("64", "int | str | None", 64), ("true", "bool | str", True), ("full", "bool | str", "full"),
    ("1:30", "int | str", "1:30"), ("no", "str | list[str]", "no"), ("007", "str | None", "007"),
    ("[1, 2]", "list[int]", [1, 2]), ("{a: 2e-3}", "dict[str, Any] | None", {"a": 0.002}),
    ("[a, b]", "str | list[str] | None", ["a", "b"]), ("-1", "int", -1), ("x", "Optional[Union[int, str]]", "x"),
    ("2020", "str | list[str] | Corpus | None", "2020"), ("3", "int | float | str", 3), ("3", "float | str", 3.0),
    ("no way", "list[str] | dict[Any, str] | None", ["no way"]), ("{1: a}", "list[str] | dict[Any, str]", {1: "a"}),
    ("ddp", "str | Strategy", "ddp"), ("{class_path: a.B}", "str | Strategy", {"class_path": "a.B"}),
])  # fmt: skip
def test_a_word_becomes_a_value_of_the_type_that_is_asked_for(text, kind, value):
    found = convert_text(text, kind, "x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value, kind", [("many", "int"), (2.5, "int"), (True, "int"), (float("inf"), "int"), (None, "int"),
                                         ("fast", "float"), (3, "str"), ("yes", "bool"), (["a"], "list[int]"),
                                         ("a", "list[str]"), (1, "dict[str, int] | None")])  # fmt: skip
def test_a_value_of_another_type_is_named(value, kind):
    with pytest.raises(ValueError, match="steps"):
        convert(value, kind, "steps")


def test_files_are_laid_over_each_other_flags_win_and_stand_anywhere(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: {learning_rate: 2e-3, weight_decay: 1}\nrun: {output: here}\n"
    )
    (tmp_path / "b.yaml").write_text("model:\n  weight_decay: 2\ndata:\n")
    flags, files = (
        ["--model.weight_decay=3"],
        ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}"],
    )
    for words in ([*flags, *files], [*files, *flags]):
        asked = COMMANDS["pretrain"].parse(words)
        model = asked.config["model"]
        assert (model["learning_rate"], model["weight_decay"], asked.config["run"]["output"]) == (
            0.002,
            3.0,
            "here",
        )


@pytest.mark.parametrize("words, text", [([], "of_file.txt"), (["mine.txt"], "mine.txt"), (["a.txt", "b.txt"], ["a.txt", "b.txt"]),
                                         (["a.txt", "--data.train_dataset_name_or_path+", "b.txt"], ["a.txt", "b.txt"])])  # fmt: skip
def test_a_text_without_a_flag_wins_over_files_and_over_the_run_that_goes_on(tmp_path, words, text):
    (tmp_path / "a.yaml").write_text("data: {train_dataset_name_or_path: of_file.txt}\n")
    files, base = (
        ["--config", str(tmp_path / "a.yaml")],
        {"data": {"train_dataset_name_or_path": "of_file.txt"}},
    )
    parse = COMMANDS["pretrain"].parse
    for asked in (parse([*words, *files]), parse([*files, *words]), parse(words, base)):
        assert asked.config["data"]["train_dataset_name_or_path"] == text


def test_print_config_is_the_whole_configuration_in_either_order(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {learning_rate: 2e-3}\n")
    words = ["--config", str(tmp_path / "a.yaml"), "--run.vocab_size", "60"]
    shown = [
        COMMANDS["pretrain"].parse(one).shown
        for one in (["--print_config", *words], [*words, "--print_config"])
    ]
    assert shown[0] == shown[1]
    (tmp_path / "whole.yaml").write_text(shown[0])
    whole = load_yaml(tmp_path / "whole.yaml")
    assert whole["model"]["learning_rate"] == 0.002 and whole["run"]["vocab_size"] == 60
    assert COMMANDS["pretrain"].parse(["--config", str(tmp_path / "whole.yaml")]).config == whole


def test_an_entry_of_a_dictionary_is_set_by_itself_and_a_list_grows():
    asked = COMMANDS["pretrain"].parse(["--data.collator_kwargs", "{a: 1, b: 2}", "--data.collator_kwargs.b", "3",
                                        "--model.model_kwargs.deep.er", "x", "--trainer.callbacks+=one.A",
                                        "--trainer.callbacks+", "{class_path: two.B}"])  # fmt: skip
    assert asked.config["data"]["collator_kwargs"] == {"a": 1, "b": 3}
    assert asked.config["model"]["model_kwargs"] == {"deep": {"er": "x"}}
    assert asked.config["trainer"]["callbacks"] == ["one.A", {"class_path": "two.B"}]


def test_an_entry_may_follow_a_mapping_or_nothing_and_a_plain_flag_may_come_again():
    parse = COMMANDS["finetune"].parse
    given = parse(
        [
            "--model.adapter",
            "{type: lora}",
            "--model.adapter.r",
            "8",
            "--model.gradient_checkpointing.mode",
            "full",
        ]
    ).given
    assert given["model.adapter"] == {"type": "lora", "r": 8} and given[
        "model.gradient_checkpointing"
    ] == {"mode": "full"}
    assert parse(["--model.adapter.r", "8", "--model.adapter.r", "4"]).given["model.adapter"] == {
        "r": 4
    }
    assert parse(["--run.num_epochs", "1", "--run.num_epochs", "2"]).given["run.num_epochs"] == 2


def test_the_help_of_overwrite_promises_to_move_only_what_is_moved():
    helps = {
        name: " ".join(command.help().split())
        for name, command in COMMANDS.items()
        if command.overwrite
    }
    moved = {name for name, said in helps.items() if "moved into previous-N" in said}
    assert (
        set(helps) - moved == {"predict", "card", "embed encode"}
        and "tokens that are there" in helps["tokenize"]
    )
    assert all("anew where" in helps[name] for name in set(helps) - moved)


def test_a_flag_that_comes_again_keeps_the_type_of_the_lists_elements():
    sentences = ["[MASK] is a cat.", "Note: the [MASK].", "2020", "[MASK] and [MASK]"]
    words = [word for sentence in sentences for word in ("--run.preview_sentences", sentence)]
    assert COMMANDS["pretrain"].parse(words).config["run"]["preview_sentences"] == sentences


def test_resume_takes_a_directory_or_none_and_overwrite_stands_alone():
    parse = COMMANDS["pretrain"].parse
    asked = parse(["--trainer.max_steps", "-1", "--resume"])
    assert asked.resume is True and asked.config["trainer"]["max_steps"] == -1
    assert (
        parse(["--resume", "x", "--run.output", "y"]).resume == "x" == parse(["--resume=x"]).resume
    )
    assert parse(["--run.compile_ahead", "--overwrite"]).config["run"]["compile_ahead"] is True
    assert parse(["--overwrite"]).overwrite and not parse([]).resume
    asked = COMMANDS["demo"].parse(["--resume", "--max-documents", "5", "--streaming"])
    assert asked.given == {"max_documents": 5, "streaming": True} and asked.resume is True


@pytest.mark.parametrize("command, words, parts", [
    ("pretrain", ["--model.learning_rat", "1"], ["'model.learning_rat'", "did you mean 'model.learning_rate'"]),
    ("pretrain", ["--learning_rate", "1"], ["did you mean 'model.learning_rate'"]),
    ("pretrain", ["--zzz", "1"], ["'zzz' is no parameter"]),
    ("pretrain", ["--overwite"], ["did you mean 'overwrite'"]),
    ("pretrain", ["--model.learning_rate"], ["needs a value"]),
    ("pretrain", ["--model.objective", "mml"], ["model.objective 'mml'", "did you mean 'mlm'", "diffusion"]),
    ("pretrain", ["--run.loggers", "[cvs]"], ["run.loggers 'cvs'", "did you mean 'csv'"]),
    ("pretrain", ["--data.seed", "1"], ["follows seed_everything"]),
    ("validate", ["run", "other"], ["nobody reads 'other'"]),
    ("validate", ["run", "--run.output", "other"], ["run.output", "twice", "'run'"]),
    ("pretrain", ["--data.train_dataset_name_or_path=b.txt", "a.txt"], ["train_dataset_name_or_path", "twice", "'a.txt'"]),
    ("finetune", ["--trainer.max_steps", "3"], ["max_steps", "leave it out"]),
    ("demo", ["--lerning-rate", "1"], ["did you mean 'learning_rate'"]),
    ("demo", ["--batch-size", "many"], ["batch_size must be int, got 'many'"]),
    ("predict", [], ["directory is missing"]),
    ("pretrain", ["--overwrite=false"], ["--overwrite stands alone", "=false"]),
    ("demo", ["--resume=there"], ["--resume stands alone", "--output there"]),
    ("pretrain", ["--data.collator_kwargs", "3"], ["data.collator_kwargs must be dict"]),
    ("fill-mask", ["d", "--top_q", "3"], ["did you mean 'top_k'"]),
    ("distill", ["s.yaml", "--run.output", "x"], ["run.output", "leave it out"]),
    ("finetune", ["--model.adapter", "lora", "--model.adapter.r", "8"], ["--model.adapter.r sets an entry", "which is lora"]),
    ("finetune", ["--data.dataset_name_or_path", "x.csv", "--data.dataset_name_or_path.test", "y.csv"], ["which is x.csv"]),
    ("finetune", ["--model.gradient_checkpointing", "true", "--model.gradient_checkpointing.mode", "full"], ["is true"]),
    ("pretrain", ["--data.collator_kwargs", "{a: 3}", "--data.collator_kwargs.a.b", "1"], ["entry of data.collator_kwargs.a, which is 3"]),
    ("finetune", ["--data.text_column", "premise", "--data.text_column", "hypothesis"], ["--data.text_column is said twice", "[a, b]"]),
    ("pretrain", ["--trainer.devices", "1", "--trainer.devices", "2"], ["--trainer.devices is said twice"]),
])  # fmt: skip
def test_a_mistake_is_named_with_what_was_probably_meant(command, words, parts):
    with pytest.raises(ValueError) as error:
        COMMANDS[command].parse(words)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("text, part", [("model: {learning_rat: 1}", "learning_rate"), ("model: [1", "not YAML"), ("- a", "mapping"),
                                        ("model: 3", "model must be a mapping"), ("modle: {a: 1}", "modle"),
                                        ("data: {seed: 3}", "seed_everything"), ("run: {keep_last: x}", "run.keep_last")])  # fmt: skip
def test_a_mistake_in_a_file_names_the_file(tmp_path, text, part):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        COMMANDS["pretrain"].parse(["--config", str(tmp_path / "wrong.yaml")])
    assert (
        "wrong.yaml" in str(error.value)
        and part in str(error.value)
        and "\n" not in str(error.value)
    )


def test_the_users_own_class_is_no_misspelt_name():
    asked = COMMANDS["pretrain"].parse(["--model.optimizer_class", "my_file.MyOptimizer"])
    assert asked.config["model"]["optimizer_class"] == "my_file.MyOptimizer"


def test_the_words_of_a_run_that_goes_on_add_nothing_twice(tmp_path):
    command, key = COMMANDS["pretrain"], "data.train_dataset_name_or_path"
    words = [
        "--data.train_dataset_name_or_path+",
        "b.txt",
        "--data.train_dataset_name_or_path+",
        "c.txt",
    ]
    (tmp_path / "a.yaml").write_text("data: {train_dataset_name_or_path: [a.txt]}")
    begun = command.parse(["--config", str(tmp_path / "a.yaml"), *words])
    assert begun.config["data"]["train_dataset_name_or_path"] == ["a.txt", "b.txt", "c.txt"]
    run = {name: value for name, value in begun.config.items()}
    for again in (words, ["--config", str(tmp_path / "a.yaml"), *words]):
        assert command.parse(again, run).config == begun.config
    more = command.parse([*words, f"--{key}+", "d.txt"], run).config["data"][
        "train_dataset_name_or_path"
    ]
    assert more == ["a.txt", "b.txt", "c.txt", "d.txt"]
    anew = command.parse([f"--{key}", "c.txt", f"--{key}+", "b.txt"], run).config["data"][
        "train_dataset_name_or_path"
    ]
    assert anew == ["c.txt", "b.txt"]
