#!/bin/bash
#SBATCH --job-name=athanor
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --array=1-6%1
#SBATCH --signal=B:USR1@300
#SBATCH --chdir=/checkout
#SBATCH --output=.athanor/slurm-%A_%a.log
#SBATCH --open-mode=append
# Written by `athanor launch slurm`. Each job goes on where the last one ended: what is finished is not done again, and a
# training stage continues from its last checkpoint. The chain ends when everything is built, when something is wrong
# (the log says what), after `athanor stop` or scancel, or after 6 jobs.
#
# 300 s before its end Slurm asks the job to save: no checkpoint was timed here yet; after the first run, make the script again.

export PATH=/env/bin:$PATH
end=${SLURM_JOB_END_TIME:-$(date -d "$(scontrol -o show job "$SLURM_JOB_ID" | grep -o 'EndTime=[^ ]*' | cut -d= -f2)" +%s)}
export SLURM_JOB_END_TIME=$end

# This machine is node 0. It starts its training on the other nodes by srun, and all meet at its address.
head=$(scontrol -o show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
others=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vx "$SLURMD_NODENAME" | paste -sd ' ')
export ATHANOR_LAUNCH="processes=0 hosts='$others' endpoint=$head:$((20000 + SLURM_JOB_ID % 10000))"

# As Ctrl-C would: DVC and its stage get it together. With -m they are a group of their own.
set -m
/env/bin/python -m athanor repro --supervise &
work=$!
set +m
time_is_over=
trap 'time_is_over=1 signalled=1; kill -INT -- -$work 2>/dev/null' USR1
trap 'signalled=1; kill -INT -- -$work 2>/dev/null' TERM
# A signal ends a wait, too: then it says nothing of the work, which may have ended meanwhile. 127: it was asked before.
signalled=1
while [ -n "$signalled" ]; do
    signalled=
    wait "$work"
    code=$?
    [ "$code" = 127 ] || status=$code
done

# 75: saved, to be continued. Without Slurm's signal that is so if the stage has seen the end of the job itself.
[ "$(date +%s)" -lt "$((end - 390))" ] || time_is_over=1
if [ "$status" = 75 ] && [ -n "$time_is_over" ]; then
    exit 0 # the next job of the array goes on
fi
scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" # finished, or something that the next job would meet, too
exit "$status"
