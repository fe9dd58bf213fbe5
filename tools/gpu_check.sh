#!/usr/bin/env bash
# What one GPU can show of megatron-switch in a few minutes: the versions in use, the numbers of a
# tiny model in every dispatch and recompute mode against each other, training of a small one in
# bf16 with save and resume, and a sample from it. Ends with 1 at the first thing that fails.
#
#   tools/gpu_check.sh [FOLDER]    FOLDER keeps the results (default: a new one, removed again)
#
# DEVICE=cpu rehearses the script itself. PYTHON names the interpreter.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac
[[ "${1:-}" != -* ]] || { echo "$1 is no folder; --help says what there is" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python}
DEVICE=${DEVICE:-cuda}
OUT=${1:-$(mktemp -d)}
[ $# -ge 1 ] || trap 'rm -rf "$OUT"' EXIT
mkdir -p "$OUT"

say() { printf '\n== %s\n' "$*"; }

say "versions"
"$PYTHON" tools/check_environment.py
if [ "$DEVICE" = cuda ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
fi

say "the same numbers in every mode"
LAUNCH=()  # on GPUs check-layouts runs on the ranks of a launcher, on the CPU it forks its own
[ "$DEVICE" = cpu ] || LAUNCH=(-m torch.distributed.run --standalone --nproc-per-node 1)
"$PYTHON" "${LAUNCH[@]}" -m megatron_switch check-layouts --max-ranks 1 --device "$DEVICE"

TRAIN=(
  --switch-device "$DEVICE" --switch-run-dir "$OUT/run" --mock-data
  --tokenizer-type NullTokenizer --vocab-size 1000
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
  --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm
  --disable-bias-linear --num-experts 8 --bf16
  --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3
  --log-interval 5 --eval-iters 1
)

say "training, stopped after 10 of 20 iterations"
"$PYTHON" -m megatron_switch train "${TRAIN[@]}" --exit-interval 10
say "and continued"
"$PYTHON" -m megatron_switch train "${TRAIN[@]}"
say "what was written"
tail -n 1 "$OUT/run/metrics.jsonl" | cut -c1-300
say "a sample"
"$PYTHON" -m megatron_switch generate --switch-device "$DEVICE" --load "$OUT/run" \
  --prompt "1 2 3" --num-tokens 16
say "all of it worked on $DEVICE"
