"Commands by their words, as tests call them from Python."

from bertlab.cli.commands import COMMANDS
from bertlab.cli.main import call, parse_command
from bertlab.cli.parser import configuration, parse


def words_of(words, resume=False, overwrite=False):
    flags = ["--resume", str(resume)] if isinstance(resume, str) else ["--resume"] * resume
    return [*map(str, words), *flags, *["--overwrite"] * overwrite]


def pretrain(words=(), resume=False, overwrite=False):
    return call("pretrain", words_of(words, resume, overwrite))


def run_finetuning(words=(), resume=False, overwrite=False):
    return call("finetune", words_of(words, resume, overwrite))


def finetune_embeddings(words=(), resume=False, overwrite=False):
    return call("embed finetune", words_of(words, resume, overwrite))


def config_of(command, words=(), base=None):
    return configuration(COMMANDS[command], list(map(str, words)), base)


def resumed_config(command, words=(), resume=False):
    config = parse_command(command, words_of(words, resume)).config
    return {
        name: config[name]
        for name in (*COMMANDS[command].sections, "seed_everything")
        if name in config
    }


def validate(words=()):
    from bertlab.cli.models import validate_model

    return validate_model(
        config_of("validate", words), parse(COMMANDS["validate"], words).overrides
    )
