"""Run every benchmark in order, as `make bench` does; finished measurements are not repeated.

    python benchmarks/suite.py [--quick] [--only pretraining scaling]

Results go to build/benchmarks/results. Those of the project, in benchmarks/results, stay as they are.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

MINUTES = {  # on two cores
    "startup": 3, "packing": 1, "delivery": 3, "memory": 4, "demo": 8, "finetuning_trainer": 10, "finetuning_families": 10,
    "scaling": 15, "pretraining": 60, "practitioner": 15,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that they run")
    parser.add_argument("--only", nargs="+", choices=MINUTES, default=list(MINUTES))
    parser.add_argument("--plan", action="store_true", help="print what would run, and how long")
    options = parser.parse_args()
    for name in options.only:
        print(f"{name:20} about {MINUTES[name]} minutes", flush=True)
        if options.plan:
            continue
        start = time.perf_counter()
        script = Path(__file__).with_name(f"{name}.py")
        subprocess.run([sys.executable, script, *["--quick"] * options.quick], check=True)
        print(f"{name:20} took {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
