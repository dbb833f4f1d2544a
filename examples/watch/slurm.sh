#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Trains on all ranks, and watches them from the first node through request files in the run's folder, which all nodes
# see: sbatch slurm.sh train.py --its --flags
set -euo pipefail
runs=${STEPSCOPE_RUNS:-$PWD/runs}
name=job-$SLURM_JOB_ID

stepscope run --serve --no-diagnose --folder "$runs" --name "$name" srun --kill-on-bad-exit=1 python "$@" &
training=$!

while [ ! -e "$runs/$name/run.json" ] && kill -0 "$training" 2>/dev/null; do sleep 0.2; done
stepscope watch "$runs/$name" --through-files --every "${STEPSCOPE_EVERY:-10m}" \
    --alert 'step_ms changes 10%' --alert 'failures >= 3 for 1' --on-alert "tee -a $runs/$name/alerts.jsonl" \
    >"$runs/$name-watch.log" 2>&1 &
watch=$!

code=0
wait "$training" || code=$?
kill "$watch" 2>/dev/null || true
exit "$code"
