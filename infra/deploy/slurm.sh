#!/usr/bin/env bash
#SBATCH --job-name=ostinato
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=ostinato-%j.log
# RL over the nodes of one Slurm allocation: a Ray head on the first, which runs the command, and a Ray node on each
# other. Submit it with the environment's `bin` on PATH and a home that all nodes see under the same path:
#   export PATH=$PWD/.venv/bin:$PATH OSTINATO_HOME=/shared/ostinato
#   sbatch slurm.sh
#   sbatch --nodes=4 slurm.sh ostinato run reinforcement --recipe my.toml
# Five minutes before the time limit the run stops and the job is queued again; it continues where it stopped.
set -euo pipefail

if (($# == 0)); then
  set -- ostinato run reinforcement --recipe nano --set "reinforcement.engine_replicas=$SLURM_JOB_NUM_NODES" \
    --set "reinforcement.rollout_workers=$SLURM_JOB_NUM_NODES" --set rollout.boxes=fleet
fi
: "${OSTINATO_HOME:?set it to a folder that all nodes see under the same path}"
for program in ray ostinato python; do
  command -v "$program" >/dev/null || { echo "$program is not on PATH, wanted the environment's bin there" >&2; exit 2; }
done

# Ray runs whatever a client sends: only readers of this token file can be clients
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$OSTINATO_HOME/ray-token-$SLURM_JOB_ID
mkdir -p "$OSTINATO_HOME"
(umask 077 && head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 >"$RAY_AUTH_TOKEN_PATH")

read -r address _ < <(hostname --all-ip-addresses)
export OSTINATO_RAY_ADDRESS=$address:$((20000 + SLURM_JOB_ID % 10000))
export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1

command='' running=()
stop_command() {
  [[ -z $command ]] || { kill -TERM "$command" 2>/dev/null && wait "$command"; } || true
}
finish() {
  stop_command
  for process in "${running[@]}"; do kill "$process" 2>/dev/null || true; done
  wait
  rm -f "$RAY_AUTH_TOKEN_PATH"
}
queue_again() {
  stop_command
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap finish EXIT
trap queue_again USR1
trap 'exit 143' TERM INT

ray start --head --node-ip-address="$address" --port="${OSTINATO_RAY_ADDRESS##*:}" --include-dashboard=false \
  --num-cpus="$SLURM_CPUS_ON_NODE" --block &
running+=($!)
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
  srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --exclude="$SLURMD_NODENAME" \
    ray start --address="$OSTINATO_RAY_ADDRESS" --block &
  running+=($!)
fi

# The run assigns roles to the nodes that are present when it begins. Each check is a new process, because a process
# that connects while Ray is still starting is aborted.
count_nodes='
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))'
until timeout 60 python -P -c "$count_nodes" "$OSTINATO_RAY_ADDRESS" "$SLURM_JOB_NUM_NODES" 2>/dev/null; do
  ((SECONDS < 300)) || { echo "not all $SLURM_JOB_NUM_NODES nodes joined Ray within 300 s" >&2; exit 1; }
  for process in "${running[@]}"; do
    kill -0 "$process" 2>/dev/null || { echo "Ray ended before all nodes had joined" >&2; exit 1; }
  done
  sleep 2
done

"$@" &
command=$!
wait "$command"
