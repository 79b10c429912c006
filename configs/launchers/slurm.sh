#!/bin/bash
# A run on two machines of eight GPUs, by SLURM. From the folder with the text or the configuration:
#     OUTPUT=/shared/my-run sbatch configs/launchers/slurm.sh --config configs/several-nodes.yaml
# What stands after the file's name are words of `bertlab pretrain`. Submit the same line again, and the run goes
# on; so it does where SLURM itself starts the job again after a machine was taken away.

#SBATCH --job-name=bertlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# --ntasks-per-node is a process for each GPU; --signal asks the run to save and stop two minutes before the time is over.

set -euo pipefail
OUTPUT=${OUTPUT:-/shared/my-run}  # on a disk that all machines see
RESUME=""
if [ -e "$OUTPUT/run.yaml" ]; then RESUME="--resume"; fi
srun --kill-on-bad-exit=1 bertlab pretrain "$@" --run.output "$OUTPUT" $RESUME
