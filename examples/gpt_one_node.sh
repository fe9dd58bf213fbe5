#!/usr/bin/env bash
# A Switch GPT with 64 experts on one node of eight GPUs: expert parallelism 8, so each GPU holds 8
# experts of every sparse layer, and every GPU is a data-parallel replica of the dense layers.
#
#   DATA=corpus/corpus TOKENIZER=corpus/tokenizer.model ./gpt_one_node.sh [more flags]
#
# Install Transformer Engine for speed: pip install 'megatron-switch[te]'. Flags of the command line
# override those below.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac

RUN=${RUN:-runs/gpt-one-node}
: "${DATA:?set the data, as in DATA=corpus/corpus}"
: "${TOKENIZER:?set the tokenizer, as in TOKENIZER=corpus/tokenizer.model}"

MODEL=(
  --num-layers 12 --hidden-size 1024 --num-attention-heads 16
  --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
)
SWITCH=(--num-experts 64 --moe-aux-loss-coeff 1e-2 --moe-expert-capacity-factor 1.25)
LAYOUT=(
  --expert-model-parallel-size 8
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
  --bf16 --micro-batch-size 4 --global-batch-size 256 --train-iters 100000
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
  --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0
  --split '98,1,1' --eval-interval 1000 --eval-iters 20 --log-interval 10
)
SAVING=(--save-interval 1000 --switch-run-dir "$RUN")
DATA_FLAGS=(
  --data-path "$DATA"
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
)

# shellcheck disable=SC2086  # LAUNCH is words
exec ${LAUNCH:-torchrun --standalone --nproc-per-node 8 -m megatron_switch train} \
  "${MODEL[@]}" "${SWITCH[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" \
  "${SAVING[@]}" "${DATA_FLAGS[@]}" --switch-device cuda "$@"
