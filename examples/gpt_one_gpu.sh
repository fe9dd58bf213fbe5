#!/usr/bin/env bash
# A Switch GPT on one GPU, without Transformer Engine.
#
#   DATA=corpus/corpus TOKENIZER=corpus/tokenizer.model ./gpt_one_gpu.sh 24 [more flags]
#
# The first argument is the GPU's memory: 8 or 24 (GB). The sizes are computed from weights,
# optimizer state and activations; they were not measured on every card. If memory runs out, lower --micro-batch-size or add --recompute-granularity full --recompute-method uniform
# --recompute-num-layers 1. Flags of the command line override those below.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac

MEMORY=${1:-24}
shift || true
RUN=${RUN:-runs/gpt-one-gpu}
: "${DATA:?set the data, as in DATA=corpus/corpus}"
: "${TOKENIZER:?set the tokenizer, as in TOKENIZER=corpus/tokenizer.model}"

case "$MEMORY" in
  8)
    MODEL=(
      --num-layers 8 --hidden-size 512 --num-attention-heads 8
      --seq-length 1024 --max-position-embeddings 1024
    )
    BATCH=(--micro-batch-size 4 --global-batch-size 64)
    ;;
  24)
    MODEL=(
      --num-layers 12 --hidden-size 768 --num-attention-heads 12
      --seq-length 4096 --max-position-embeddings 4096
    )
    BATCH=(--micro-batch-size 2 --global-batch-size 64)
    ;;
  *)
    echo "usage: $0 8|24 [more flags]" >&2
    exit 2
    ;;
esac
ARCHITECTURE=(
  --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights
)
SWITCH=(--num-experts 8)
TRAINING=(
  --bf16 --train-iters 20000 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine
  --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1.0
  --hidden-dropout 0 --attention-dropout 0
  --split '98,1,1' --eval-interval 1000 --eval-iters 20 --log-interval 10
)
SAVING=(--save-interval 1000 --switch-run-dir "$RUN")
DATA_FLAGS=(
  --data-path "$DATA"
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
)

# shellcheck disable=SC2086  # LAUNCH is words
exec ${LAUNCH:-megatron-switch train} \
  "${MODEL[@]}" "${ARCHITECTURE[@]}" "${SWITCH[@]}" "${BATCH[@]}" "${TRAINING[@]}" \
  "${SAVING[@]}" "${DATA_FLAGS[@]}" --switch-device cuda "$@"
