#!/usr/bin/env bash
# A small Switch GPT on four CPU ranks of this computer, with tensor, sequence, expert and data
# parallelism. Nothing is downloaded.
#
#   ./cpu_4_ranks.sh [more flags]
#
# RUN is the folder for data and run; TEXT is a folder of text, by default Python's standard library.
# Flags of the command line override those below.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac

RUN=${RUN:-runs/cpu-4-ranks}

megatron-switch prepare "${TEXT:---stdlib}" --vocab-size "${VOCAB_SIZE:-2048}" --output "$RUN/data"

MODEL=(
  --num-layers 4 --hidden-size 128 --num-attention-heads 4
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
  --normalization RMSNorm --disable-bias-linear
)
SWITCH=(--num-experts 8 --moe-z-loss-coeff 1e-3)
LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel
  --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
  --use-distributed-optimizer
)
TRAINING=(
  --micro-batch-size 8 --global-batch-size 16 --train-iters 200
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20
  --hidden-dropout 0 --attention-dropout 0
  --split '98,1,1' --eval-interval 100 --eval-iters 4 --log-interval 10
)
SAVING=(--save-interval 100 --switch-run-dir "$RUN/run")
DATA=(
  --data-path "$RUN/data/corpus"
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$RUN/data/tokenizer.model"
)

exec megatron-switch launch-local -n 4 \
  "${MODEL[@]}" "${SWITCH[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" \
  "${SAVING[@]}" "${DATA[@]}" --switch-device cpu "$@"
