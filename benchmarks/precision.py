"""bfloat16 beside float32 on this CPU: how much faster, and at what price in validation loss.

    python benchmarks/precision.py [--steps 100] [--seeds 3] [--threads 1] [--output FILE]

An encoder of 4 layers of 256 with the demo's vocabulary, on packed rows of the embedded corpus. Two
models begin with the same weights and take the same batches, step by step in turns: one in 32-true,
one in bf16-mixed (weights in float32, products in bfloat16), each with the attention kernel that a
model with attn_implementation="auto" takes in its precision. A step is forward, backward, clipping,
optimizer and schedule.

The ratio is the median over turns of float32's seconds by bfloat16's, so that neighbours in time are
compared: on the processor's clock, which a busy machine stretches less, and on the wall. The validation
losses are those of the two models at the end, over all held-out rows, both computed in float32; the
verdict takes the seed with the largest relative difference. Three minutes on one core.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
from sides import BenchmarkParser, processor, write_result

import bertlab
from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.data.module import PretrainingDataModule
from bertlab.core.devices import cpu_multiplies_bfloat16
from bertlab.train.modules import BATCH_KEYS, PretrainingModule, build_optimizer
from bertlab.train.trainer import seed_everything

ROWS, LENGTH, VOCABULARY, DOCUMENTS, WARM_STEPS = 8, 128, 8192, 2500, 5
SHAPE = dict(hidden_size=256, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
PRECISIONS = {"float32": nullcontext, "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16)}
TARGET = "at least 1.4 times the throughput of float32 on both clocks, validation loss within 1 %"


def inputs_of(batch: dict) -> dict:
    return {name: batch[name] for name in BATCH_KEYS if name in batch}


class Run:
    "One model in one precision, and how long its steps took."

    def __init__(self, precision: str, tokenizer, seed: int, steps: int):
        seed_everything(seed)
        self.context, self.times, self.losses = PRECISIONS[precision], [], []
        self.module = PretrainingModule(
            SHAPE, None, tokenizer, learning_rate=1e-3, scheduler_warmup_steps=steps // 10,
            compile_model=False, model_kwargs={"attn_implementation": "auto"})  # fmt: skip
        self.module.configure_model()
        self.model = self.module.model.train()
        found = build_optimizer(self.model, self.module.hparams, steps)
        self.optimizer, self.schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]

    def step(self, batch: dict) -> None:
        start = time.process_time(), time.perf_counter()
        with self.context():
            out = self.model(**inputs_of(batch), loss_config=self.module.loss_config)
        self.optimizer.zero_grad()
        (out.loss_sum / out.num_labels).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(out.loss.item())
        self.times.append((time.process_time() - start[0], time.perf_counter() - start[1]))

    @torch.no_grad()
    def validate(self, batches: list[dict]) -> float:  # nats per label
        self.model.eval()
        outs = [self.model(**inputs_of(batch)) for batch in batches]
        return float(sum(out.loss_sum for out in outs) / sum(out.num_labels for out in outs))


def measure(steps: int, seed: int, tokenizer, data: PretrainingDataModule) -> dict:
    "Both precisions, in turns."
    batches, loader = [], data.train_dataloader()
    while len(batches) < steps:
        batches += loader  # the next epoch
    runs = {name: Run(name, tokenizer, seed, steps) for name in PRECISIONS}
    for number, batch in enumerate(batches[:steps]):
        for run in list(runs.values())[:: 1 if number % 2 else -1]:  # neither is always first
            run.step(batch)
    times = {name: run.times[WARM_STEPS:] for name, run in runs.items()}
    real = statistics.mean(int((batch["attention_mask"] > 0).sum()) for batch in batches[:steps])
    kernels = {}
    for name, run in runs.items():
        with run.context(), torch.enable_grad():
            run.model.train()
            kernels[name] = run.model.encoder.attention_kernel(torch.device("cpu"), LENGTH)[0]
    found = {"seed": seed, "attention_kernels": kernels, "load": os.getloadavg()[0]}
    for i, clock in enumerate(("processor", "wall")):
        pairs = zip(*(times[name] for name in PRECISIONS))
        found[f"{clock}_ratio"] = statistics.median(slow[i] / fast[i] for slow, fast in pairs)
        seconds = {name: statistics.median(pair[i] for pair in times[name]) for name in PRECISIONS}
        found[f"{clock}_seconds_per_step"] = seconds
        found[f"{clock}_tokens_per_second"] = {name: real / seconds[name] for name in PRECISIONS}
    found["training_loss"] = {
        name: [round(loss, 4) for loss in run.losses] for name, run in runs.items()
    }
    validation = list(data.val_dataloader())
    found["validation_loss"] = {name: run.validate(validation) for name, run in runs.items()}
    a, b = found["validation_loss"].values()
    return found | {"relative_loss_difference": b / a - 1}


def main() -> None:
    parser = BenchmarkParser("precision", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    corpus = embedded_corpus(max_documents=DOCUMENTS)
    tokenizer = train_tokenizer(corpus.train_texts, VOCABULARY)
    data = PretrainingDataModule(
        corpus, tokenizer, max_sequence_length=LENGTH, train_batch_size=ROWS
    )
    data.setup()
    runs, start = [], time.perf_counter()
    for seed in range(arguments.seeds):
        runs.append(measure(arguments.steps, seed, tokenizer, data))
        print(
            f"seed {seed}: {runs[-1]['processor_ratio']:.2f} and {runs[-1]['wall_ratio']:.2f} times float32, "
            f"validation loss {runs[-1]['relative_loss_difference']:+.2%}",
            flush=True,
        )
    ratios = {
        clock: statistics.median(run[f"{clock}_ratio"] for run in runs)
        for clock in ("processor", "wall")
    }
    difference = max((run["relative_loss_difference"] for run in runs), key=abs)
    result = {
        "what": __doc__.splitlines()[0], "target": TARGET,
        "reached": min(ratios.values()) >= 1.4 and abs(difference) <= 0.01,
        "throughput_ratio": ratios, "relative_loss_difference": difference, "runs": runs,
        "multiplies_bfloat16": cpu_multiplies_bfloat16(), "processor": processor(),
        "cores": os.cpu_count(), "threads": arguments.threads,
        "measured": time.strftime("%Y-%m-%d"), "seconds": time.perf_counter() - start,
        "batch": f"{ROWS} rows of {LENGTH}", "vocabulary": len(tokenizer), **SHAPE,
        "steps": arguments.steps, "torch": str(torch.__version__), "bertlab": bertlab.__version__,
    }  # fmt: skip
    write_result(arguments.output, result)
    print(f"{ratios['processor']:.2f} times float32 on the processor's clock, {ratios['wall']:.2f} on the "
          f"wall, validation loss {difference:+.2%}; target: {TARGET}")  # fmt: skip


if __name__ == "__main__":
    main()
