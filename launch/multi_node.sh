#!/usr/bin/env bash
# Train on several machines: run the same command on each, with a different --node-rank.
#
#   launch/multi_node.sh --nnodes 2 --node-rank 0 --head 10.0.0.1 -- -e exp -d hf_datasets/corpus
#   launch/multi_node.sh --nnodes 2 --node-rank 1 --head 10.0.0.1 -- -e exp -d hf_datasets/corpus
#
#   --nnodes N           machines (or NNODES)
#   --node-rank R        this machine's number, 0 to N-1 (or NODE_RANK)
#   --head ADDR          address of machine 0 that all others can reach (or MASTER_ADDR, HEAD_ADDR)
#   --port P             unused port of machine 0 (or MASTER_PORT, HEAD_PORT; default: 29500)
#   --nproc-per-node K   processes on this machine (or NPROC_PER_NODE; default: one per GPU, or one
#                        on the CPU)
#   --interface IF       network interface (default: the one whose route leads to the head)
#   --max-restarts M     maximum number of restarts in a row without a new checkpoint (default: 3)
#   --save-seconds S     seconds that the last save may take (or SAVE_SECONDS; default: 120)
#   --backoff S          seconds before the first restart, then doubled (or BACKOFF_SECONDS;
#                        default: 5)
#   --wait-seconds S     seconds to wait for a missing machine (or WAIT_SECONDS; default: 900)
#   --on-end COMMAND     shell command that runs once when the launch ends (--on-end-seconds S: its
#                        limit; default: 20)
#   --dry-run            print the command and start nothing
#
# The options after `--` are those of 04_train_fsdp.py. Relative paths start from the current
# directory; --save-dir must be on a file system that all machines share. To let a lost machine join
# again, run the same command on it. After SIGTERM, SIGINT or SIGUSR1 on any machine, the run saves
# and all machines end with exit code 75; a second SIGINT kills the ranks without a save (130). The
# other exit codes are those of stage 04, the same on every machine.
#
# An option wins over its variables; without the option, its variables must be equal. PET_NNODES,
# PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT and PET_NPROC_PER_NODE of torchrun are read too.
# WORLD_SIZE and RANK are not read, since they count machines on some clusters, processes on others.
#
# Other variable: PYTHON.

set -euo pipefail
: "${LAUNCHED_AS:=$(printf '%q ' "$0" "$@")}"    # the command that messages of the run repeat
export LAUNCHED_AS
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

nnodes='' node_rank='' head='' port='' nproc=''
save_seconds='' backoff_seconds='' wait_seconds=''
supervise=()
while (($#)); do
  value=${2:-} words=2 name=${1%%=*}
  if [[ $1 == --*=* ]]; then value=${1#*=} words=1; fi
  case ${name//_/-} in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --) shift; break ;;
    --nnodes) nnodes=$value ;;
    --node-rank) node_rank=$value ;;
    --head | --master-addr) head=$value ;;
    --port | --master-port) port=$value ;;
    --nproc-per-node) nproc=$value ;;
    --save-seconds) save_seconds=$value ;;
    --backoff) backoff_seconds=$value ;;
    --wait-seconds) wait_seconds=$value ;;
    --on-end | --on-end-seconds) supervise+=("$name=$value") ;;
    *) supervise+=("$1") words=1 ;;
  esac
  shift $((words < $# ? words : $#))
done

problems=()
read_variables() {  # VALUE OPTION VARIABLE…: fill in a value that no option has set
  local -n value=$1
  local option=$2 typed=$value first='' name
  for name in "${@:3}"; do
    if [[ -z ${!name:-} || ${!name} == "$value" ]]; then continue; fi
    if [[ -n $typed ]]; then
      echo "launcher: $option $typed replaces $name=${!name} of the environment" >&2
    elif [[ -n $first ]]; then
      problems+=("$first=$value and $name=${!name} contradict each other, and $option is not given")
    else
      first=$name value=${!name}
    fi
  done
  if [[ -n $first && $option != --head && ! $value =~ ^[0-9]+$ ]]; then
    problems+=("$first=$value in the environment is not a whole number ($option)")
  fi
}
if [[ ${PET_NPROC_PER_NODE:-} == @(auto|gpu) ]]; then unset PET_NPROC_PER_NODE; fi
read_variables nnodes --nnodes NNODES PET_NNODES
read_variables node_rank --node-rank NODE_RANK PET_NODE_RANK
read_variables head --head MASTER_ADDR HEAD_ADDR PET_MASTER_ADDR
read_variables port --port MASTER_PORT HEAD_PORT PET_MASTER_PORT
read_variables nproc --nproc-per-node NPROC_PER_NODE PET_NPROC_PER_NODE
if ((${#problems[@]})); then
  printf 'error: %s\n' "${problems[@]}" >&2
  exit 2
fi
if [[ -z $nnodes && -n ${WORLD_SIZE:-} ]]; then
  echo "launcher: WORLD_SIZE=$WORLD_SIZE is not read; NNODES counts the machines" >&2
fi
if [[ -z $node_rank && -n ${RANK:-} ]]; then
  echo "launcher: RANK=$RANK is not read; NODE_RANK numbers the machines" >&2
fi
unset WORLD_SIZE RANK LOCAL_RANK  # with them, the launcher would log as a rank
port=${port:-29500}
unset "${!PET_@}"  # torchrun would read them, and PET_RDZV_ENDPOINT would replace the head

python=${PYTHON:-python3}                     # EDIT: an interpreter with requirements.txt
if [[ -z ${PYTHON:-}${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then
  python=$root/.venv/bin/python
fi
: "${save_seconds:=${SAVE_SECONDS:-120}}"     # EDIT: seconds that the last save may take
: "${backoff_seconds:=${BACKOFF_SECONDS:-5}}" # EDIT: seconds before the first restart, then doubled
: "${wait_seconds:=${WAIT_SECONDS:-900}}"     # EDIT: seconds to wait for a missing machine
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
