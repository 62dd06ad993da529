#!/usr/bin/env bash
#SBATCH --job-name=specdec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=8
# One run over SLURM nodes, one process a node:
#
#     sbatch experiments/launch/slurm.sh generate --mesh data=2,model=8 \
#         --target org/target --draft org/draft --prompts prompts.jsonl \
#         --output out.jsonl --resume
#
# The coordinator is given, not detected, so that a node that never starts is named.
set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR="$HEAD:$((20000 + SLURM_JOB_ID % 20000))"
exec srun bash -c 'exec specdec "$@" --coordinator "$COORDINATOR" \
    --num-processes "$SLURM_NTASKS" --process-id "$SLURM_PROCID"' -- "$@"
