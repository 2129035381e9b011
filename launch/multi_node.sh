#!/usr/bin/env bash
# Train on several machines: run the same command on each, with a different --node-rank.
#
#   launch/multi_node.sh --nnodes 2 --node-rank 0 --head 10.0.0.1 -- -e exp -d hf_datasets/corpus
#   launch/multi_node.sh --nnodes 2 --node-rank 1 --head 10.0.0.1 -- -e exp -d hf_datasets/corpus
#
#   --nnodes N           machines (or NNODES)
#   --node-rank R        this machine's number, 0 to N-1 (or NODE_RANK)
#   --head ADDR          address of machine 0 that all others can reach (or HEAD_ADDR)
#   --port P             unused port of machine 0 (default: 29500, or HEAD_PORT)
#   --nproc-per-node K   processes on this machine (default: one per GPU, or one on the CPU)
#   --interface IF       network interface (default: the one whose route leads to the head)
#   --max-restarts M     maximum number of restarts in a row without a new checkpoint (default: 3)
#   --dry-run            print the command and start nothing
#
# The options after `--` are those of 04_train_fsdp.py. Relative paths start from the current
# directory; --save-dir must be on a file system that all machines share. To let a lost machine join
# again, run the same command on it. After SIGTERM, SIGINT or SIGUSR1 on any machine, the run saves
# and all machines end with exit code 75; a second SIGINT kills the ranks without a save (130). The
# other exit codes are those of stage 04, the same on every machine.
#
# Environment variables: PYTHON, NPROC_PER_NODE, SAVE_SECONDS, BACKOFF_SECONDS, WAIT_SECONDS.

set -euo pipefail
: "${LAUNCHED_AS:=$(printf '%q ' "$0" "$@")}"    # the command that messages of the run repeat
export LAUNCHED_AS
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

nnodes=${NNODES:-} node_rank=${NODE_RANK:-} head=${HEAD_ADDR:-} port=${HEAD_PORT:-29500}
nproc=${NPROC_PER_NODE:-}
supervise=()
while (($#)); do
  value=${2:-} words=2
  if [[ $1 == --*=* ]]; then value=${1#*=} words=1; fi
  case $1 in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --) shift; break ;;
    --nnodes | --nnodes=*) nnodes=$value ;;
    --node-rank | --node-rank=*) node_rank=$value ;;
    --head | --head=*) head=$value ;;
    --port | --port=*) port=$value ;;
    --nproc-per-node | --nproc-per-node=*) nproc=$value ;;
    *) supervise+=("$1") words=1 ;;
  esac
  shift $((words < $# ? words : $#))
done

python=${PYTHON:-python3}                     # EDIT: an interpreter with requirements.txt
if [[ -z ${PYTHON:-}${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
fi
save_seconds=${SAVE_SECONDS:-120}             # EDIT: seconds that the last save may take
backoff_seconds=${BACKOFF_SECONDS:-5}         # EDIT: seconds before the first restart, then doubled
wait_seconds=${WAIT_SECONDS:-900}             # EDIT: seconds to wait for a missing machine
if [[ -z $nproc ]]; then  # one process per GPU that this process may use
  if [[ " $* " =~ " --device"(" "|=)"cpu " ]]; then gpus=
  elif [[ -v CUDA_VISIBLE_DEVICES ]]; then gpus=${CUDA_VISIBLE_DEVICES//,/$'\n'}
  else gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep '^GPU' || true); fi
  nproc=$(grep -c . <<<"${gpus:-the CPU}")
fi

exec "$python" "$root/launch/supervise.py" --nnodes "$nnodes" --node-rank "$node_rank" \
  --head "$head" --port "$port" --nproc-per-node "$nproc" "${supervise[@]}" \
  --save-seconds "$save_seconds" \
  --backoff "$backoff_seconds" --wait-seconds "$wait_seconds" -- \
  "$python" "$root/launch/torchrun.py" --nnodes "$nnodes" --node-rank "$node_rank" \
  --master-addr "$head" --master-port "$port" \
  --nproc-per-node "$nproc" --max-restarts 0 \
  --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout "$save_seconds" \
  "$root/04_train_fsdp.py" "$@"
