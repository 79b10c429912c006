"""Compare what `bertlab pretrain` takes by itself with the reference's numbers, at several widths and lengths.

    python benchmarks/recipes.py [--widths 192 256] [--steps 300 1000] [--arms auto reference] [--quick]

Each run trains random weights on the embedded corpus or --text. The results go to build/benchmarks/results/recipes.json.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from bertlab.cli.commands import COMMANDS
from bertlab.cli.parser import configuration
from bertlab.core.files import write_json
from bertlab.core.serialization import load_json
from bertlab.train.modules import default_learning_rate
from bertlab.train.run import Run, build_pretraining
from bertlab.train.reports import environment

RESULTS = Path("build/benchmarks/results/recipes.json")
ARMS = {
    "reference": ["--run.recipe", "reference"],
    "adamw, cooldown": ["--model.optimizer_class", "adamw"],
    "auto": [],
    "muon, constant": ["--model.scheduler_cooldown_steps", "0"],
    **{f"muon, {factor:g} x AdamW's rate": ["--model.optimizer_class", "muon", "--model.scheduler_cooldown_steps", "25%",
                                            "--model.learning_rate", f"{factor} x"]
       for factor in (1, 2, 4, 8, 16)},
    **{f"lion, {factor:g} x AdamW's rate": ["--model.optimizer_class", "lion", "--model.learning_rate", f"{factor} x"]
       for factor in (0.1, 0.2, 0.5)},
    **{f"cooldown {share}": ["--model.scheduler_cooldown_steps", share] for share in ("10%", "50%")},
    "muon, momentum 0.95": ["--model.optimizer_class", "muon", "--model.optimizer_kwargs", "{momentum: 0.95, betas: [0.9, 0.98]}"],
}  # fmt: skip


def train(
    arm: str, width: int, steps: int, seed: int, length: int, rows: int, text: list[str]
) -> dict:
    "Train one model, and return its metrics."
    shape = {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": width // 64 or 1,
             "intermediate_size": 2 * width, "max_position_embeddings": length}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        words = [
            *text, *ARMS[arm], "--run.output", f"{directory}/run", "--run.models", "false", "--run.progress", "none",
            "--data.max_sequence_length", str(length), "--data.train_batch_size", str(rows), "--trainer.max_steps", str(steps),
            "--run.val_every_steps", str(steps), "--seed_everything", str(seed),
        ]  # fmt: skip
        for name, value in shape.items():
            words += [f"--model.model_config_kwargs.{name}", str(value)]
        adamw = default_learning_rate(width)
        words = [str(float(word[:-2]) * adamw) if word.endswith(" x") else word for word in words]
        config = configuration(COMMANDS["pretrain"], words)
        run = Run(config, build_pretraining)
        run.prepare()
        metrics, options = run.fit(), run.module.options
    return {
        "arm": arm, "text": [Path(name).name for name in text], "width": width, "steps": steps, "seed": seed, "tokens_per_step": rows * length, "optimizer": options.optimizer_class,
        "learning_rate": options.learning_rate, "val_loss": metrics["val_loss"], "seconds": metrics["train_seconds"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that it runs")
    parser.add_argument("--widths", nargs="+", type=int, default=[192, 256, 384])
    parser.add_argument("--steps", nargs="+", type=int, default=[300, 1000, 6000])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["reference", "adamw, cooldown", "auto"])  # fmt: skip
    parser.add_argument(
        "--text", nargs="+", default=[], help="files (default: the embedded corpus)"
    )
    parser.add_argument("--length", type=int, default=128, help="positions of a row")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    if options.quick:
        options.widths, options.steps, options.arms = [32], [3], ["reference", "auto"]
    results = load_json(RESULTS)["runs"] if RESULTS.exists() and not options.quick else []
    finished = [(row["arm"], row["width"], row["steps"], row["seed"]) for row in results]
    for width, steps, arm, seed in itertools.product(
        options.widths, options.steps, options.arms, options.seeds
    ):
        if (arm, width, steps, seed) in finished:
            continue
        results.append(train(arm, width, steps, seed, options.length, options.rows, options.text))
        print(results[-1], flush=True)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        write_json(RESULTS, {"record": environment(), "runs": results})


if __name__ == "__main__":
    main()
