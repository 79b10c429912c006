#!/bin/bash
# A run on two machines of eight GPUs with SLURM. From the folder with the text or the configuration:
#     OUTPUT=/shared/my-run sbatch bertlab/configs/launchers/slurm.sh --config several-nodes
# The arguments after the file's name are passed to `bertlab pretrain`. Submit the same line again to resume the run;
# it also resumes when SLURM requeues the job after a machine was preempted.

#SBATCH --job-name=bertlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# --ntasks-per-node starts a process for each GPU; --signal asks the run to save and stop two minutes before the limit.

set -euo pipefail
OUTPUT=${OUTPUT:-/shared/my-run}  # on a file system that all machines share
RESUME=""
if [ -e "$OUTPUT/run.yaml" ]; then RESUME="--resume"; fi
srun --kill-on-bad-exit=1 bertlab pretrain "$@" --run.output "$OUTPUT" $RESUME
