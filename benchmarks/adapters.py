"""LoRA beside full fine-tuning on the offline tasks: score and memory of states, three seeds each.

    python benchmarks/adapters.py [--quick] [--steps 1000]

A small encoder is pretrained once on the embedded corpus. Then each task is fine-tuned with all weights and
with LoRA, three seeds, the better of two rates for each arm chosen on validation rows of the first seed. Judged:
LoRA's mean test score is within the band of full fine-tuning's seeds (its lowest to its highest, widened by the
standard deviation of LoRA's own), and its states take a fifth or less.
"""

import json
from pathlib import Path

from sides import Ledger, common_parser, fingerprint, judge, machine, say, spread, write_result

import bertlab
from bertlab.core.plots import BLUE, ORANGE, new_axes

TASKS = ("docstring-area", "code-tokens", "api-questions")
RATES = {"full": (3e-4, 1e-3), "lora": (1e-3, 4e-3)}
SEEDS = (0, 1, 2)


def pretrain(place: Path, steps: int) -> Path:
    "The encoder that all arms begin with."
    from bertlab.cli.pretrain import find_model
    from bertlab.cli.pretrain import pretrain as run

    place = place / f"encoder-{steps}"
    if not (place / "metrics.json").exists():
        shape = dict(hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=3,
                     max_position_embeddings=512, local_attention=64, initializer_range=0.04)  # fmt: skip
        run(["--run.output", str(place), "--trainer.max_steps", str(steps), "--data.max_sequence_length", "128",
             "--data.train_batch_size", "32", "--model.model_config_kwargs", json.dumps(shape),
             "--model.learning_rate", "0.002", "--model.scheduler_cooldown_steps", str(steps // 5),
             "--run.progress", "none"], overwrite=place.exists())  # fmt: skip
    return find_model(place)


def measure(model: str, task: str, arm: str, rate: float, seed: int, size: int | None, epochs: int) -> dict:
    "One fine-tuning: scores, and bytes of states."
    import tempfile

    from lightning.pytorch.callbacks import Callback

    from bertlab.data.tokenizers import load_tokenizer
    from bertlab.finetuning.data import FinetuningDataModule
    from bertlab.finetuning.module import FinetuningModule
    from bertlab.finetuning.runs import finetune
    from bertlab.finetuning.tasks import load_task
    from bertlab.optim.optimizers import state_bytes

    class States(Callback):
        bytes = 0

        def on_train_batch_end(self, trainer, *_):
            self.bytes = max(self.bytes, state_bytes(trainer.optimizers[0]))

    found = load_task(task, sizes=None if size is None else {name: size for name in ("train", "validation", "test")})
    data = FinetuningDataModule(None, load_tokenizer(model), task=found.kind,
                                max_sequence_length=found.max_sequence_length)  # fmt: skip
    data.set_datasets(**found.splits)
    module = FinetuningModule(found.kind, model, learning_rate=rate, warmup_ratio=0.1, scheduler_type="linear",
                              adapter={"type": "lora", "r": 8} if arm == "lora" else None)  # fmt: skip
    states = States()
    with tempfile.TemporaryDirectory() as place:
        run = finetune(module, data, place, num_epochs=epochs, seed=seed, callbacks=[states], precision="32-true")
    monitor = module.monitor
    return {"validation": float(run.metrics[monitor]), "states": states.bytes,
            "test": float(run.metrics[monitor.replace("val_", "test_")])}  # fmt: skip


def draw(result: dict):
    "Scores of each seed, by task and arm."
    figure, axes = new_axes("", "score on the test rows", size=(6.5, 3.5))
    for place, (_, arms) in enumerate(result["cases"].items()):
        for shift, arm, colour in ((-0.12, "full", BLUE), (0.12, "lora", ORANGE)):
            axes.plot([place + shift] * len(arms[arm]["test"]), arms[arm]["test"], "o", color=colour,
                      label=arm if place == 0 else None)  # fmt: skip
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

    cases, judged = {}, []
    for task in tasks:
        cases[task] = {}
        for arm, rates in RATES.items():
            first = {rate: ask(task, arm, rate, seeds[0]) for rate in rates}
            rate = max(first, key=lambda r: first[r]["validation"])  # noqa: B023
            runs = [first[rate], *(ask(task, arm, rate, seed) for seed in seeds[1:])]
            cases[task][arm] = {"rate": rate, "test": [run["test"] for run in runs], "states": runs[0]["states"]}
            print(f"  {task:16} {arm:5} rate {rate:g}  {[round(run['test'], 3) for run in runs]}  "
                  f"{runs[0]['states'] / 2**20:.2f} MiB of states", flush=True)  # fmt: skip
        full, lora = cases[task]["full"], cases[task]["lora"]
        share = lora["states"] / full["states"]
        mean = sum(lora["test"]) / len(lora["test"])
        width = spread(lora["test"])
        slack = (width["max"] - width["min"]) / 2 if "max" in width else 0.0
        judged += [judge(f"{task}: states of LoRA over full", share, at_most=0.2),
                   judge(f"{task}: LoRA's mean score over the lowest of full, with LoRA's own spread",
                         mean + slack - min(full["test"]), at_least=0.0)]  # fmt: skip
    say(judged)
    write_result(Path(options.output), {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": machine(options.threads),
        "steps": options.steps, "epochs": options.epochs, "seeds": list(seeds), "judged": judged,
        "cases": cases}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
