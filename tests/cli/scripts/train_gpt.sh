#!/bin/bash
# A training script of the kind that people keep beside Megatron-LM: variables, arrays, torchrun, a log file.
set -e

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT=${MASTER_PORT:-6000}
NUM_NODES=1
NODE_RANK=0

CHECKPOINT_PATH=$1 # <Specify path>
LOGS="$2"          # <Specify path>
DATA_PATH=$3       # <Specify path and file prefix>
SCRIPT=$4

# A helper that is no training.
python -c "import platform; print('python', platform.python_version())"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 6
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 64
    --max-position-embeddings 64
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters ${TRAIN_ITERS:-500}
    --attention-dropout 0
    --hidden-dropout 0
    --clip-grad 1.0
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 1
	--pipeline-model-parallel-size 2
)

DATA_ARGS=(
    --data-path $DATA_PATH
    --tokenizer-type NullTokenizer
    --vocab-size 16384
    --null-tokenizer-eod-id 256
    --split 98,1,1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save $CHECKPOINT_PATH
    --eval-iters 1
)

mkdir -p "$LOGS"
torchrun ${DISTRIBUTED_ARGS[@]} "$SCRIPT" \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${EVAL_AND_LOGGING_ARGS[@]} 2>&1 | tee "$LOGS/train.log"
