#!/bin/sh
# Trains with the best plan of the run r: 1.23x (1.20 to 1.23).
cd /tmp/quartet/cwd || exit
exec quartet train --plan /tmp/quartet/run_of_0.1.0/best/plan.json -- \
    torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 8
