#!/usr/bin/env bash
# The demo under DeepSpeed: real text, a small GPT on two CPU processes, a search over layout, split and mapping,
# and training on with the winner. Usage: bash examples/demo_deepspeed/run.sh PYTHON [RUN_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
runs=${2:-runs}
bin=$(dirname "$python")
export PATH="$(cd "$bin" && pwd):$PATH" OMP_NUM_THREADS=1 DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}

echo "== 1. real text: the Python standard library's own source files, as byte-level tokens"
"$python" examples/prepare_data.py data/stdlib --max-mb 8

# An ordinary DeepSpeed command. quartet never edits it.
command=(deepspeed --num_gpus 2 examples/pretrain_deepspeed.py --deepspeed_config examples/demo_deepspeed/ds_config.json
    --data-path data/stdlib --num-layers 8 --hidden-size 192 --num-attention-heads 4 --seq-length 64
    --vocab-size 16384 --pipeline-stages 2 --train-iters 40 --log-interval 10)

echo "== 2. quartet tune -- ${command[*]}"
rm -rf "$runs/demo-deepspeed"
quartet tune --config examples/demo_deepspeed/q.yaml --run-dir "$runs" -- "${command[@]}"

if [ -f "$runs/demo-deepspeed/best/plan.json" ]; then
    echo "== 3. quartet train --plan $runs/demo-deepspeed/best/plan.json -- (the same command)"
    quartet train --plan "$runs/demo-deepspeed/best/plan.json" --device cpu -- "${command[@]}"
    echo "== 4. quartet show $runs/demo-deepspeed/best/plan.json, and the plan as a plain ds_config"
    quartet show "$runs/demo-deepspeed/best/plan.json"
    quartet export "$runs/demo-deepspeed/best/plan.json"
else
    echo "== 3. no better plan was found: training goes on with the command as it is"
    quartet train --device cpu -- "${command[@]}"
fi
