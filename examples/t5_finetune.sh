#!/usr/bin/env bash
# Fine-tune a Switch-T5 on pairs of texts, on one GPU, without Transformer Engine.
#
#   DATA=pairs.jsonl TOKENIZER=tokenizer.model ./t5_finetune.sh [more flags]
#   DATA=pairs.jsonl LOAD=checkpoints/switch-base-8 ./t5_finetune.sh [more flags]
#
# DATA has one JSON object per line: {"input": "translate English to German: Hello", "target": "Hallo"}.
# With LOAD, model and tokenizer are those of the checkpoint; without it, a model of Switch-Base size
# with 8 experts is trained from scratch. Dropout is 0.1, and 0.4 inside experts, as in the Switch
# paper's fine-tuning (table 4). Flags of the command line override those below.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac

RUN=${RUN:-runs/t5-finetune}
: "${DATA:?set the pairs of texts, as in DATA=pairs.jsonl}"

if [[ -n "${LOAD:-}" ]]; then
  MODEL=(--load "$LOAD" --finetune --use-checkpoint-args)
else
  : "${TOKENIZER:?set the tokenizer, as in TOKENIZER=tokenizer.model, or LOAD to a checkpoint}"
  MODEL=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
    --ffn-hidden-size 3072 --num-experts 8 --seq-length 512
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
  )
fi
SWITCH=(--switch-arch t5 --switch-expert-dropout 0.4)
BATCH=(--decoder-seq-length 128 --micro-batch-size 8 --global-batch-size 64)
TRAINING=(
  --bf16 --train-iters 5000 --lr 1e-4 --lr-decay-style constant --lr-warmup-iters 100
  --weight-decay 0.0 --clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1
  --eval-interval 500 --eval-iters 20 --log-interval 10
)
DATA_FLAGS=(--data-path "$DATA" --split '95,5,0')
SAVING=(--save-interval 500 --switch-run-dir "$RUN")

# shellcheck disable=SC2086  # LAUNCH is words
exec ${LAUNCH:-megatron-switch train} \
  "${MODEL[@]}" "${SWITCH[@]}" "${BATCH[@]}" "${TRAINING[@]}" \
  "${DATA_FLAGS[@]}" "${SAVING[@]}" --switch-device cuda "$@"
