#!/usr/bin/env bash
# Train on all GPUs of this machine, or on its CPU, and restart after failures if that can help.
#
#   launch/single_node.sh -- -e exp -d hf_datasets/corpus
#   launch/single_node.sh --nproc-per-node 4 -- -e exp -d hf_datasets/corpus --max-steps 1000
#
#   --nproc-per-node K   processes (default: one per GPU, or one on the CPU)
#   --max-restarts M     maximum number of restarts in a row without a new checkpoint (default: 3)
#   --save-seconds S     seconds that the last save may take (or SAVE_SECONDS; default: 120)
#   --backoff S          seconds before the first restart, then doubled (or BACKOFF_SECONDS;
#                        default: 5)
#   --on-end COMMAND     shell command that runs once when the launch ends (--on-end-seconds S: its
#                        limit; default: 20)
#   --dry-run            print the command and start nothing
#
# The options after `--` are those of 04_train_fsdp.py. Relative paths start from the current
# directory. After SIGTERM, SIGINT or SIGUSR1 the run saves and ends with exit code 75; a second
# SIGINT kills the ranks without a save (130). The other exit codes are those of stage 04.
#
# An option wins over its variable. Other variables: PYTHON, NPROC_PER_NODE.

set -euo pipefail
: "${LAUNCHED_AS:=$(printf '%q ' "$0" "$@")}"    # the command that messages of the run repeat
export LAUNCHED_AS
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

nproc=${NPROC_PER_NODE:-}
save_seconds='' backoff_seconds=''
supervise=()
while (($#)); do
  value=${2:-} words=2 name=${1%%=*}
  if [[ $1 == --*=* ]]; then value=${1#*=} words=1; fi
  case ${name//_/-} in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --) shift; break ;;
    --nproc-per-node) nproc=$value ;;
    --save-seconds) save_seconds=$value ;;
    --backoff) backoff_seconds=$value ;;
    --nnodes | --node-rank | --head | --master-addr | --port | --master-port | --interface | \
      --wait-seconds)
      echo "error: $name is an option for several machines, and this launcher starts one" >&2
      echo "  hint:     launch/multi_node.sh has it" >&2
      exit 2 ;;
    --on-end | --on-end-seconds) supervise+=("$name=$value") ;;
    *) supervise+=("$1") words=1 ;;
  esac
  shift $((words < $# ? words : $#))
done

# torchrun sets these for its ranks, and would read PET_… as its own options.
unset "${!PET_@}" WORLD_SIZE RANK LOCAL_RANK

python=${PYTHON:-python3}                     # EDIT: an interpreter with requirements.txt
if [[ -z ${PYTHON:-}${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
fi
: "${save_seconds:=${SAVE_SECONDS:-120}}"     # EDIT: seconds that the last save may take
: "${backoff_seconds:=${BACKOFF_SECONDS:-5}}" # EDIT: seconds before the first restart, then doubled
if [[ -z $nproc ]]; then  # one process per GPU that this process may use
  if [[ " $* " =~ " --device"(" "|=)"cpu " ]]; then gpus=
  elif [[ -v CUDA_VISIBLE_DEVICES ]]; then gpus=${CUDA_VISIBLE_DEVICES//,/$'\n'}
  else gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep '^GPU' || true); fi
  nproc=$(grep -c . <<<"${gpus:-the CPU}")
fi

exec "$python" "$root/launch/supervise.py" "${supervise[@]}" \
  --nproc-per-node "$nproc" --save-seconds "$save_seconds" --backoff "$backoff_seconds" -- \
  "$python" "$root/launch/torchrun.py" --standalone --local-addr 127.0.0.1 \
  --nproc-per-node "$nproc" --max-restarts 0 \
  --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout "$save_seconds" \
  "$root/04_train_fsdp.py" "$@"
