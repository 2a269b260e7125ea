#!/usr/bin/env bash
# The demo: real text, a small GPT on two CPU processes, a search over shape, layout, split, schedule and mapping,
# and training on with the winner.
# Usage: bash examples/demo/run.sh PYTHON [RUN_FOLDER]
# DEMO_OPTIONS are further options of the search, such as "--trials 3 --max-minutes 5".
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
runs=${2:-runs}
bin=$(dirname "$python")
export PATH="$(cd "$bin" && pwd):$PATH" OMP_NUM_THREADS=1

echo "== 1. real text: the Python standard library's own source files, as byte-level tokens"
"$python" examples/prepare_data.py data/stdlib --max-mb 8

# An ordinary Megatron command. quartet never edits it.
command=(torchrun --nproc-per-node 2 examples/pretrain_gpt.py
    --num-layers 8 --hidden-size 192 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16
    --tokenizer-type NullTokenizer --vocab-size 16384 --null-tokenizer-eod-id 256 --data-path data/stdlib --split 98,1,1
    --train-iters 40 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0
    --attention-dropout 0 --hidden-dropout 0 --log-interval 10 --eval-interval 1000 --eval-iters 1
    --save data/demo-checkpoint --save-interval 40)

echo "== 2. quartet tune -- ${command[*]}"
rm -rf "$runs/demo" data/demo-checkpoint
quartet tune --config examples/demo/q.yaml --run-dir "$runs" ${DEMO_OPTIONS:-} -- "${command[@]}"

# Megatron prints a thousand lines: all of them go to a file, the ones about the training here.
train() {
    quartet train "$@" --device cpu -- "${command[@]}" 2>&1 | tee "$runs/demo/train.log" |
        grep --line-buffered -E '^quartet|elapsed time|saved checkpoint|loss at iteration'
}

if [ -f "$runs/demo/best/plan.json" ]; then
    echo "== 3. quartet train --plan $runs/demo/best/plan.json -- (the same command); the whole log: $runs/demo/train.log"
    train --plan "$runs/demo/best/plan.json"
    echo "== 4. quartet show $runs/demo/best/plan.json"
    quartet show "$runs/demo/best/plan.json"
else
    echo "== 3. no better plan was found: training goes on with the command as it is; the log: $runs/demo/train.log"
    train
fi
