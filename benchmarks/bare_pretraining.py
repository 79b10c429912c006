"""Does a bare `bertlab pretrain` learn? Its validation loss beside the line of the unigram guesser, over three seeds.

    python benchmarks/bare_pretraining.py [--quick] [--steps 100 300 1000] [--rates 5e-4] [--output FILE]

Nothing is given but the number of steps and the seed: shape, rate, warmup and batch are what the command chooses on
this device. As a control the same run is made at the rate that fresh weights of width 768 would get (`--rates`), which
is what a narrow model had before its width counted. The text is Python's own documentation.
"""

import contextlib
import io
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import torch
from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

import bertlab
from bertlab.cli.main import main as program

SEEDS, STEPS = (0, 1, 2), (100, 300, 1000)


def run_once(steps: int, seed: int, rate: float | None, more: list[str]) -> dict:
    "One run by the command itself: the line that it prints, and where its validation ends."
    with tempfile.TemporaryDirectory() as folder:
        words = ["pretrain", "--trainer.max_steps", str(steps), "--seed_everything", str(seed), "--run.progress", "none",
                 "--run.output", f"{folder}/run", "--run.val_every_steps", str(steps), *more]  # fmt: skip
        words += [] if rate is None else ["--model.learning_rate", str(rate)]
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            status = program(words)
        if status:
            raise SystemExit(f"bertlab {' '.join(words)} failed")
        metrics = json.loads(Path(folder, "run", "metrics.json").read_text(encoding="utf-8"))
    line = float(told.getvalue().partition("line    ")[2].split()[0])
    used = float(told.getvalue().partition("rate    ")[2].split()[0])
    return {"steps": steps, "seed": seed, "rate": used, "given": rate, "line": line, "val_loss": metrics["val_loss"],
            "below": line - metrics["val_loss"], "seconds": metrics["train_seconds"]}  # fmt: skip


def verdicts(found: list[dict]) -> list[dict]:
    "What the command chooses must learn: the worst seed of each length, and beside the best rate that was given."
    judged = []
    for steps in sorted({row["steps"] for row in found}):
        chosen = [row["below"] for row in found if row["steps"] == steps and row["given"] is None]
        judged.append(
            judge(
                f"{steps} steps: nats below the unigram line, worst seed", min(chosen), at_least=0.0
            )
        )
        for rate in sorted({row["given"] for row in found} - {None}):
            other = [
                row["below"] for row in found if row["steps"] == steps and row["given"] == rate
            ]
            gain = statistics.mean(chosen) - statistics.mean(other)
            judged.append(
                judge(f"{steps} steps: nats below the mean of rate {rate:g}", gain, at_least=0.0)
            )
    return judged


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "bare_pretraining", rounds=1)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[5e-4],
        help="controls beside the rate nobody gave",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, seeds, more = options.steps, options.seeds, []
    if options.quick:
        steps, seeds = (60,), SEEDS[:1]
        more = [
            "--run.vocab_size",
            "1000",
            "--data.train_batch_size",
            "8",
            "--data.data_kwargs.max_documents",
            "600",
        ]
    ledger, found = (
        Ledger(options.kept / "bare_pretraining.json", fingerprint(__file__), options.fresh),
        [],
    )
    for length, rate, seed in itertools.product(steps, (None, *options.rates), seeds):
        case = (length, seed, rate, more)
        row, known = ledger.ask(json.dumps([*case, options.threads]), lambda: run_once(*case))  # noqa: B023
        found.append(row)
        print(f"{row['steps']:5} steps  rate {row['rate']:.2g}{'' if rate else ' (nobody gave it)'}  seed {seed}  "
              f"{row['val_loss']:.3f}, {row['below']:+.3f} below the line {row['line']:.3f}  "
              f"{row['seconds']:.0f} s{' (kept)' * known}", flush=True)  # fmt: skip
    judged = verdicts(found)
    say(judged)
    write_result(options.output, {"what": __doc__.splitlines()[0], "bertlab": bertlab.__version__,
                                  "machine": machine(options.threads), "runs": found, "judged": judged})  # fmt: skip


if __name__ == "__main__":
    main()
