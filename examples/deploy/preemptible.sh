#!/bin/bash
# Trains on a node that may be taken away: REFT_JOB=run1 examples/deploy/preemptible.sh /shared/reft python train.py
#
#   SIGTERM ─► the trainers end ─► the daemon writes the newest whole step to /shared/reft ─► exit code 143
#   the same command, on this node or another one ─► goes on from that step
#
# Slurm, whose job id is the job's name:   #SBATCH --requeue
#                                          #SBATCH --signal=TERM@60
#                                          srun examples/deploy/preemptible.sh /shared/reft python train.py
# Kubernetes: the command of a container, with REFT_JOB, and terminationGracePeriodSeconds: 60 in its pod.

set -euo pipefail
storage=$1
shift

reft-daemon --persist "$storage" --persist-every "${REFT_PERSIST_EVERY:-30m}" --flush-on-exit --grace 25s &
daemon=$!
until reft-cli status > /dev/null 2>&1; do
    kill -0 $daemon # without a daemon the script ends here
    sleep 0.2
done

"$@" &
training=$!
preempted=
trap 'preempted=1; kill -TERM $training $daemon 2> /dev/null || true' TERM

code=0
wait $training || code=$? # a signal interrupts this
if [[ $preempted ]]; then
    wait $training || true
    code=143
fi
kill -TERM $daemon 2> /dev/null || true # it writes the last step, if that is not on storage
wait $daemon || true
exit $code
