#!/usr/bin/env bash
# big: 4 nodes x 8 GPUs (H100 80 GB SXM, NVLink 4, one NDR InfiniBand NIC a GPU).
# Layout: TP 1 x CP 1 x PP 1 x DP 32; experts ETP 1 x EP 32 x PP 1 x EDP 1.
# Rendered by:
#   megatron-switch render-launch --nodes 4 --run-dir runs/big --name big -- --switch-model \
#     switch-base-128 --expert-model-parallel-size 32 --micro-batch-size 4 --global-batch-size \
#     512 --bf16 --train-iters 100000 --lr 3e-4 --data-path corpus/corpus --tokenizer-type \
#     SentencePieceTokenizer --tokenizer-model corpus/tokenizer.model
#
# Start it on every node, with a name of the first node that all nodes resolve:
#   NODE_RANK=0 MASTER_ADDR=node1 ./big.sh     (NODE_RANK=1 on the next, ...)
# Arguments are flags of megatron-switch train and override those below. PREFLIGHT="" skips the
# checks. Starting the script again resumes the run.
set -euo pipefail

# Relative paths start from the folder in which this script is started.
RUN=runs/big # on a file system that all nodes share
LOGS=$RUN/launch # output of each rank
PYTHON=${PYTHON:-python} # with megatron-switch installed, on every node
NODES=4
GPUS=8 # per node
export NODES GPUS

# Variables that are already set take precedence.
# expert buffers change size: less fragmentation
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# NVLink SHARP's buffers cost memory in every group
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
# ranks share the node's CPU cores
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# data workers are forked after threads have started
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# node-local: thousands of ranks would contend for one file system
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-${USER:-user}}"

FLAGS=(
  --switch-model switch-base-128
  --expert-model-parallel-size 32
  --micro-batch-size 4
  --global-batch-size 512
  --bf16
  --train-iters 100000
  --lr 3e-4
  --data-path corpus/corpus
  --tokenizer-type SentencePieceTokenizer
  --tokenizer-model corpus/tokenizer.model
  --switch-run-dir "$RUN"
  --switch-device cuda
)

mkdir -p "$LOGS"
step() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() {
  printf 'launch: error: %s\n' "$*" >&2
  exit 1
}

: "${NODE_RANK:?index of this node, counted from 0}" "${MASTER_ADDR:?name of node 0}"
MASTER_PORT=${MASTER_PORT:-29500}

# Preflight finds in seconds what would otherwise fail after minutes on all nodes.
for check in ${PREFLIGHT-gpus port rehearsal}; do
  case $check in
  gpus)
    seen=$(nvidia-smi --list-gpus) || fail "nvidia-smi --list-gpus failed: $seen"
    seen=$(grep -c . <<<"$seen")
    ((seen == GPUS)) || fail "this node has $seen GPUs, but the job needs $GPUS. Render again" \
      "with --gpus-per-node $seen, or start on nodes with $GPUS."
    ;;
  port)
    if ((NODE_RANK == 0)) && (: 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; then
      fail "port $MASTER_PORT of $MASTER_ADDR, for the rendezvous of ranks, is in use. Set" \
        "another on all nodes: MASTER_PORT=$((MASTER_PORT + 1))"
    fi
    ;;
  rehearsal)
    if ((NODE_RANK == 0)); then
      step "rehearsing rank 0 of $((NODES * GPUS)): $LOGS/rehearsal.log"
      CUDA_VISIBLE_DEVICES='' "$PYTHON" -m megatron_switch rehearse --world-size $((NODES * GPUS)) \
        --ranks-per-node "$GPUS" --rank 0 -- "${FLAGS[@]}" "$@" \
        >"$LOGS/rehearsal.log" 2>&1 ||
        fail "the rehearsal failed: $(grep -A 12 "error: " "$LOGS/rehearsal.log" ||
          tail -n 5 "$LOGS/rehearsal.log")"
    fi
    ;;
  *) fail "PREFLIGHT accepts gpus, port and rehearsal, got $check." ;;
  esac
done

step "starting $GPUS ranks: $LOGS/node-$NODE_RANK"
exec "$PYTHON" -m torch.distributed.run \
  --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  --numa-binding node \
  --log-dir "$LOGS/node-$NODE_RANK" --redirects 3 --tee 3 \
  -m megatron_switch train "${FLAGS[@]}" "$@"
