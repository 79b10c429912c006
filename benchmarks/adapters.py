"""LoRA beside full fine-tuning on the offline tasks: score and memory of states, three seeds each.

    python benchmarks/adapters.py [--quick] [--steps 1000]

A small encoder is pretrained once on the embedded corpus. Then each task is fine-tuned with all weights and
with LoRA of rank 8 and of rank 32, three seeds, each at the best of three rates on validation rows of the first
seed. Judged, task by task, for the rank with the better mean on validation rows: its states take a fifth or less of
those of full fine-tuning, and its mean test score is no lower than the lowest of full fine-tuning's seeds, less half
of the range of its own.
"""

import json
import statistics
from pathlib import Path

from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

import bertlab
from bertlab.core.plots import BLUE, ORANGE, new_axes

TASKS = ("docstring-area", "code-tokens", "api-questions")
ARMS = {
    "full": (None, (3e-4, 1e-3, 3e-3)),
    "rank 8": ({"type": "lora", "r": 8, "lora_alpha": 16}, (1e-3, 4e-3, 1e-2)),
    "rank 32": (
        {"type": "lora", "r": 32, "lora_alpha": 64},
        (1e-3, 4e-3, 1e-2),
    ),  # about a sixth of the states
}
SEEDS = (0, 1, 2)


def pretrain(place: Path, steps: int) -> Path:
    "The encoder that all arms begin with."
    from bertlab.cli.pretrain import find_model_directory
    from bertlab.cli.pretrain import pretrain as run

    place = place / f"encoder-{steps}"
    finished = (
        place / "metrics.json"
    )  # a run that was interrupted leaves its own there, of fewer steps
    if not finished.exists() or json.loads(finished.read_text(encoding="utf-8"))["steps"] < steps:
        shape = dict(hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=3,
                     max_position_embeddings=512, local_attention=64, initializer_range=0.04)  # fmt: skip
        run(["--run.output", str(place), "--trainer.max_steps", str(steps), "--data.max_sequence_length", "128",
             "--data.train_batch_size", "32", "--model.model_config_kwargs", json.dumps(shape),
             "--model.learning_rate", "0.002", "--model.scheduler_cooldown_steps", str(steps // 5),
             "--run.progress", "none"], resume=place.exists())  # fmt: skip
    return find_model_directory(place)


def measure(
    model: str, task: str, arm: str, rate: float, seed: int, size: int | None, epochs: int
) -> dict:
    "One fine-tuning: scores, and bytes of states."
    import tempfile

    from lightning.pytorch.callbacks import Callback

    from bertlab.data.tokenizers import load_tokenizer
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.finetuning.runs import finetune
    from bertlab.finetuning.tasks import load_builtin_dataset
    from bertlab.optim.optimizers import optimizer_state_bytes

    class States(Callback):
        bytes = 0

        def on_train_batch_end(self, trainer, *_):
            self.bytes = max(self.bytes, optimizer_state_bytes(trainer.optimizers[0]))

    found = load_builtin_dataset(
        task,
        sizes=None if size is None else {name: size for name in ("train", "validation", "test")},
    )
    data = FinetuningDataModule(
        found.kind, load_tokenizer(model), max_sequence_length=found.max_sequence_length
    )
    data.set_datasets(**found.splits)
    module = FinetuningModule(found.kind, model, learning_rate=rate, warmup_ratio=0.1, scheduler_type="linear",
                              adapter=ARMS[arm][0])  # fmt: skip
    states = States()
    with tempfile.TemporaryDirectory() as place:
        run = finetune(
            module,
            data,
            place,
            num_epochs=epochs,
            seed=seed,
            callbacks=[states],
            precision="32-true",
        )
    monitor = module.monitor
    return {"validation": float(run.metrics[monitor]), "states": states.bytes,
            "test": float(run.metrics[monitor.replace("val_", "test_")])}  # fmt: skip


def draw(result: dict):
    "Scores of each seed, by task and arm."
    figure, axes = new_axes("", "score on the test rows", size=(6.5, 3.5))
    names = {"full": "all weights", "rank 8": "LoRA, rank 8", "rank 32": "LoRA, rank 32"}
    for place, (_, arms) in enumerate(result["cases"].items()):
        for shift, arm, colour, marker in (
            (-0.2, "full", BLUE, "o"),
            (0.0, "rank 8", ORANGE, "v"),
            (0.2, "rank 32", ORANGE, "s"),
        ):
            axes.plot([place + shift] * len(arms[arm]["test"]), arms[arm]["test"], marker, color=colour, alpha=0.7,
                      label=names[arm] if place == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(result["cases"])), list(result["cases"]))
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "adapters", rounds=1)
    parser.add_argument("--steps", type=int, default=1000, help="of pretraining")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, help="rows of a split at most (default: the task's)")
    options = parser.parse_args()
    tasks, seeds = TASKS, SEEDS
    if options.quick:
        options.steps, options.epochs, options.size, tasks, seeds = 20, 1, 64, TASKS[:1], (0, 1)
    import torch

    torch.set_num_threads(options.threads)
    model = str(pretrain(options.kept / "adapters", options.steps))
    ledger = Ledger(options.kept / "adapters.json", fingerprint(__file__), options.fresh)

    def ask(*case) -> dict:
        words = (*case, options.size, options.epochs)
        return ledger.ask(json.dumps([options.steps, *words]), lambda: measure(model, *words))[0]

    cases, judged, mean = {}, [], statistics.mean
    for task in tasks:
        cases[task] = {}
        for arm, (_, rates) in ARMS.items():
            first = {rate: ask(task, arm, rate, seeds[0]) for rate in rates}
            rate = max(first, key=lambda r: first[r]["validation"])  # noqa: B023
            runs = [first[rate], *(ask(task, arm, rate, seed) for seed in seeds[1:])]
            cases[task][arm] = {"rate": rate, **{part: [run[part] for run in runs] for part in ("validation", "test")},
                                "states": runs[0]["states"]}  # fmt: skip
            print(f"  {task:16} {arm:8} rate {rate:g}  {[round(run['test'], 3) for run in runs]}  "
                  f"{runs[0]['states'] / 2**20:.2f} MiB of states", flush=True)  # fmt: skip
        full, best = (
            cases[task]["full"],
            max(list(ARMS)[1:], key=lambda arm: mean(cases[task][arm]["validation"])),
        )
        lora = cases[task][best]
        slack = (max(lora["test"]) - min(lora["test"])) / 2
        judged += [judge(f"{task}: states of LoRA, {best}, over full", lora["states"] / full["states"], at_most=0.2),
                   judge(f"{task}: LoRA, {best}, mean score and half of its range, over the lowest of full",
                         mean(lora["test"]) + slack - min(full["test"]), at_least=0.0)]  # fmt: skip
    say(judged)
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": machine(options.threads),
        "steps": options.steps, "epochs": options.epochs, "seeds": list(seeds), "judged": judged,
        "cases": cases}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
