"""The engine's overhead: what a step of `bertlab pretrain` takes beyond forward, backward and optimizer.

    python benchmarks/overhead.py [--steps 20] [--rounds 5] [--output FILE]

Two ways of training bert_tiny (Turc et al. 2019) on the embedded corpus, in turns, in one process,
on one thread, in float32, from the same weights and with the same batches:

- bare: a loop of forward, backward, division by the labels, clipping, optimizer, schedule; its
  batches wait in a list
- engine: Lightning with all that `bertlab pretrain` switches on by itself: loader and masking,
  history, progress, guards against spikes and numbers that are not finite, throughput, memory;
  validation, checkpoints and model directories happen outside the measured steps

Medians over the steps of a round, then over rounds. The overhead is a share of the engine's step. It is
given in processor time, which a busy machine stretches less, and in time on the wall.
"""

import statistics
import tempfile
import time

import torch
from lightning.pytorch.callbacks import Callback
from sides import BenchmarkParser, processor, write_result

import bertlab
from bertlab.cli.main import silence_libraries
from bertlab.model.config import bert_tiny
from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.module import PretrainingDataModule
from bertlab.train.modules import BATCH_KEYS, PretrainingModule, build_optimizer
from bertlab.cli.pretrain import PretrainRunConfig, run_trainer
from bertlab.train.trainer import seed_everything

ROWS, LENGTH, VOCABULARY, WARM_STEPS = 32, 128, 30_522, 5
TARGET = "overhead below 5 % of the engine's step, on both clocks"


def make_parts(corpus, tokenizer) -> tuple[PretrainingModule, PretrainingDataModule]:
    "The same module and data each time."
    seed_everything(0)
    config = {name: value for name, value in bert_tiny(vocab_size=VOCABULARY).to_diff_dict().items()
              if not name.endswith("token_id")}  # fmt: skip
    module = PretrainingModule(config, None, tokenizer, scheduler_warmup_steps=10)
    module.configure_model()
    data = PretrainingDataModule(
        corpus, tokenizer, max_sequence_length=LENGTH, train_batch_size=ROWS
    )
    data.setup()
    return module, data


def both_clocks() -> tuple[float, float]:
    "Seconds of this process on the processor, and on the wall."
    return time.process_time(), time.perf_counter()


def median_step(times: list[tuple[float, float]]) -> tuple[float, float]:
    "The median seconds between two ends of steps, by both clocks."
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(times, times[1:])][WARM_STEPS:]
    return tuple(map(statistics.median, zip(*steps)))


class StepClock(Callback):
    "When each step ended; the last callback to be asked."

    def __init__(self):
        self.times = []

    def on_train_batch_end(self, *_) -> None:
        self.times.append(both_clocks())


def run_engine(
    module, data, steps: int
) -> tuple[float, float]:  # seconds of a step, by both clocks
    "Train as `bertlab pretrain` does."
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        run = PretrainRunConfig(output=folder, progress="plain", val_every_steps=10 * steps,
                         checkpoint_every_steps=10 * steps)  # fmt: skip
        options = {
            "max_steps": steps,
            "precision": "32-true",
            "callbacks": [clock],
            "gradient_clip_val": 1.0,
        }
        run_trainer(run, options, module, "").fit(module, data)
    return median_step(clock.times)


def run_bare(
    module, batches, steps: int
) -> tuple[float, float]:  # seconds of a step, by both clocks
    "Forward, backward, optimizer."
    model = module.model.train()
    found = build_optimizer(model, module.hparams, steps)
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]
    times = []
    for batch in batches[:steps]:
        out = model(
            **{name: batch[name] for name in BATCH_KEYS if name in batch},
            loss_config=module.loss_config,
        )
        optimizer.zero_grad()
        (out.loss_sum / out.num_labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        times.append(both_clocks())
    return median_step(times)


def measure(steps: int, rounds: int) -> dict:
    "Both ways, in turns."
    corpus = embedded_corpus(max_documents=3000)
    tokenizer = train_tokenizer(corpus.train_texts, 4096)
    batches = []
    _, data = make_parts(corpus, tokenizer)
    while len(batches) < steps:
        batches += list(data.train_dataloader())
    medians = {"bare": [], "engine": []}
    for _ in range(rounds):
        for way in medians:
            module, data = make_parts(corpus, tokenizer)
            bare = way == "bare"
            medians[way].append(
                run_bare(module, batches, steps) if bare else run_engine(module, data, steps)
            )
    clocks = {f"{name}_seconds_per_step": {way: [pair[i] for pair in pairs] for way, pairs in medians.items()}
              for i, name in enumerate(("processor", "wall"))}  # fmt: skip
    return {**clocks, "num_params": sum(p.numel() for p in module.model.parameters())}


def shares_of(seconds: dict[str, list[float]]) -> list[float]:
    "The overhead of each round: what slows the machine slows both ways of a round."
    return [1 - bare / engine for bare, engine in zip(seconds["bare"], seconds["engine"])]


def main() -> None:
    parser = BenchmarkParser("overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    silence_libraries()
    found = measure(arguments.steps, arguments.rounds)
    shares = shares_of(found["processor_seconds_per_step"])
    wall = statistics.median(shares_of(found["wall_seconds_per_step"]))
    overhead = statistics.median(shares)
    step = statistics.median(found["processor_seconds_per_step"]["engine"])
    result = {
        "what": __doc__.splitlines()[0], "target": TARGET, "reached": max(overhead, wall) < 0.05,
        "overhead_share": overhead, "overhead_share_of_rounds": shares,
        "overhead_share_on_the_wall": wall, "overhead_milliseconds": 1000 * overhead * step,
        **found, "batch": f"{ROWS} rows of {LENGTH}", "model": "bert_tiny", "precision": "32-true",
        "threads": 1, "steps": arguments.steps, "rounds": arguments.rounds, "processor": processor(),
        "torch": str(torch.__version__), "bertlab": bertlab.__version__,
    }  # fmt: skip
    write_result(arguments.output, result)
    print(f"overhead {overhead:.1%} of a step ({result['overhead_milliseconds']:.1f} ms); on the wall "
          f"{wall:.1%}; rounds: " + ", ".join(f"{share:.1%}" for share in shares))  # fmt: skip


if __name__ == "__main__":
    main()
