"""Does a bare `bertlab pretrain` learn? Its validation loss beside the line of the unigram guesser, over three seeds.

    python benchmarks/bare_pretraining.py [--quick] [--steps 100 300 1000] [--output FILE]

Nothing is given but the number of steps and the seed: shape, rate, warmup and batch are what the command chooses on
this device. As a control the same run is made at the rate that fresh weights of width 768 would get (`--rates`), which
is what a narrow model had before its width counted. The text is Python's own documentation.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from sides import RESULTS

from bertlab.cli.main import main as bertlab
from bertlab.cli.pretrain import provenance
from bertlab.core.files import written_whole

SEEDS, STEPS = (0, 1, 2), (100, 300, 1000)


def run_once(steps: int, seed: int, rate: float | None, more: list[str]) -> dict:
    "One run by the command itself: the line that it prints, and where its validation ends."
    with tempfile.TemporaryDirectory() as folder:
        words = ["pretrain", "--trainer.max_steps", str(steps), "--seed_everything", str(seed), "--run.progress", "none",
                 "--run.output", f"{folder}/run", "--run.val_every_steps", str(steps), *more]  # fmt: skip
        words += [] if rate is None else ["--model.learning_rate", str(rate)]
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            status = bertlab(words)
        if status:
            raise SystemExit(f"bertlab {' '.join(words)} failed")
        metrics = json.loads(Path(folder, "run", "metrics.json").read_text(encoding="utf-8"))
    line = float(told.getvalue().partition("line    ")[2].split()[0])
    used = float(told.getvalue().partition("rate    ")[2].split()[0])
    return {"steps": steps, "seed": seed, "rate": used, "given": rate, "line": line, "val_loss": metrics["val_loss"],
            "below": line - metrics["val_loss"], "seconds": metrics["train_seconds"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rates", type=float, nargs="*", default=[5e-4], help="controls beside the rate nobody gave")
    parser.add_argument("--quick", action="store_true", help="one seed of a short run on less text")
    parser.add_argument("--output", type=Path, help="default: results/bare_pretraining.json; quick: none")
    options = parser.parse_args()
    steps, seeds, more = options.steps, options.seeds, []
    if options.quick:
        steps, seeds = (60,), SEEDS[:1]
        more = ["--run.vocab_size", "1000", "--data.train_batch_size", "8", "--data.data_kwargs.max_documents", "600"]
    found = []
    for length in steps:
        for rate in (None, *options.rates):
            for seed in seeds:
                found.append(run_once(length, seed, rate, more))
                row = found[-1]
                print(f"{row['steps']:5} steps  rate {row['rate']:.2g}{'' if rate else ' (nobody gave it)'}  seed {seed}  "
                      f"{row['val_loss']:.3f}, {row['below']:+.3f} below the line {row['line']:.3f}  "
                      f"{row['seconds']:.0f} s", flush=True)  # fmt: skip
    output = options.output or (None if options.quick else RESULTS / "bare_pretraining.json")
    if output is not None:
        with written_whole(output) as temporary:
            text = json.dumps({"environment": provenance(), "quick": options.quick, "runs": found}, indent=1)
            temporary.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
