#!/bin/bash
# Nemotron-H 8B (Mamba-2 with four attention layers) on 32 devices: four stages of 13 layers.

MODEL_ARGS=(
    --use-mcore-models
    --is-hybrid-model
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
    --hybrid-layer-pattern 'M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-'
    --mamba-num-heads 128
    --mamba-head-dim 64
    --mamba-state-dim 128
    --mamba-num-groups 8
    --hidden-size 4096
    --ffn-hidden-size 21504
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --squared-relu
    --normalization RMSNorm
    --position-embedding-type none
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --seq-length 8192
    --max-position-embeddings 8192
    --vocab-size 131072
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
    --micro-batch-size 1
    --global-batch-size 64
    --bf16
    --clip-grad 1.0
    --no-check-for-nan-in-loss-and-grad
    --no-create-attention-mask-in-dataloader
)

torchrun --nproc_per_node 8 --nnodes 4 pretrain_mamba.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
