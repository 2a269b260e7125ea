#!/bin/bash
# Tunes on a Ray that runs already (`ray start`, or a RayCluster of KubeRay), from a host or a pod of it.
# Copy it, edit what stands between the two lines below, and run it: bash tune.sh
# The nodes see this folder and the environment under the same paths. Killed, the tuner goes on when run again.
set -euo pipefail

# ---- edit: the environment, the run and its command ----
# shellcheck source=/dev/null
source .venv/bin/activate
run=my-model
# site.yaml says what a trial takes of each node: ray: {gpus_per_node: 8, cpus_per_node: 64}
options=(--config q.yaml --site site.yaml --trial-nodes 2 --workers 2)
command=(torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096)
# ---- end of what is to be edited ----

if [[ -e runs/$run/config.json ]]; then
    options+=(--resume)
fi
exec quartet tune --launcher ray --name "$run" "${options[@]}" -- "${command[@]}"
