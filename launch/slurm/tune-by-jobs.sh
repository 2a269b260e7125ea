#!/bin/bash
# Tunes with one job for each trial, from a login node or a small job: take it where one allocation is hard to get.
# Copy it, edit what stands between the two lines below, and run it: bash tune-by-jobs.sh
# Killed or logged out, the jobs go on; run it again and it goes on too.
set -euo pipefail

# ---- edit: the environment, the run and its command ----
# shellcheck source=/dev/null
source .venv/bin/activate
run=my-model
options=(--config q.yaml --site site.yaml --trial-nodes 2 --workers 4)
command=(torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096)
# ---- end of what is to be edited ----

if [[ -e runs/$run/config.json ]]; then
    options+=(--resume)
fi
exec quartet tune --launcher slurm-batch --name "$run" "${options[@]}" -- "${command[@]}"
