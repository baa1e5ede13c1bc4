#!/bin/bash
# x-0123456789ab: 1 node with 1 process each. Written by titan_exp.

#SBATCH --job-name=x-0123456789ab
#SBATCH --comment=titan_exp:feedbeefcafe
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/.slurm/feedbeefcafe/slurm-%j.out

# The run.
RUN=/runs/x/0123456789ab
JOB="$SLURM_JOB_ID"
export TITAN_EXP_TOKEN=feedbeefcafe

echo "titan_exp: job $JOB, start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, $(date +%FT%T)"
if [ ! -e "$RUN/config.yaml" ]; then
    echo "$RUN: the run folder was deleted or moved, so job $JOB ends."
    exit 2
elif ! tail -n 1 "$RUN/attempts.jsonl" | grep -qF '"token": "'"$TITAN_EXP_TOKEN"'"'; then
    echo "$RUN: this run was started anew after job $JOB was submitted, so it ends: titan-exp status $RUN"
    exit 2
fi
# The log's second name, in the run folder.
log=/runs/.slurm/feedbeefcafe"/slurm-$JOB.out"
[ -d "$RUN/logs" ] || mkdir "$RUN/logs"
[ -e "$RUN/logs/slurm-$JOB.out" ] || ln "$log" "$RUN/logs" 2> /dev/null || ln -s "$log" "$RUN/logs"

# Numbers of ranks that the submitting shell, or an image, holds: those of srun count.
unset {,LOCAL_,GROUP_,ROLE_}{RANK,WORLD_SIZE} ROLE_NAME MASTER_{ADDR,PORT} ${!TORCHELASTIC_@}
# srun hands on what follows, also where the job itself got no environment (--export=NONE).
export SLURM_EXPORT_ENV=ALL
# The code as it was at submission: edits since then have no effect.
export PYTHONPATH=/runs/.code/0011223344556677
export TITAN_EXP_IMPORT_PATH=/home/me/project
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1

# 300 s before the time limit SLURM sends USR2 to this script alone. All ranks poll the flag, agree on a step, save
# together and exit. Those that have not in 240 s are killed, which leaves time to requeue the run.
rm -f "$RUN/stop"
signals=0
stop() {
    signals=$((signals + 1))
    why="SLURM is about to end the job (time limit, or preemption)"
    if [ -n "$SLURM_JOB_END_TIME" ]; then  # newer SLURMs set it
        why="SLURM is about to end the job (time limit)"
        [ $((SLURM_JOB_END_TIME - $(date +%s))) -le 420 ] || why="SLURM preempted the job before its time limit"
    fi
    [ -e "$RUN/stop" ] || echo "$why" > "$RUN/stop"
    [ "$signals" = 1 ] || return
    (sleep 240; kill "$step") > /dev/null 2>&1 &  # srun then kills all ranks
}
trap stop USR2

# One process per rank. srun kills the peers of a failed rank.
srun --kill-on-bad-exit=1 \
    --output="${RUN//%/%%}/logs/slurm-$JOB-${SLURM_RESTART_COUNT:-0}-rank-%5t.log" \
    /venv/bin/python -m titan_exp.launch.rank.main "$RUN" &
step=$!
# A signal ends `wait` early: repeat it until srun has ended.
while
    seen=$signals; wait "$step"; code=$?
    [ "$seen" != "$signals" ]
do :; done

# Close the attempt. Exit code 0: done, 85: requeue, any other: failed.
/venv/bin/python -m titan_exp.launch.slurm.epilogue "$RUN" "$JOB" "$code"
code=$?
if [ "$code" = 85 ]; then
    scontrol requeue "$JOB" && exit 0
    # Requeueing is forbidden here: submit a new job.
    sbatch --dependency="afterany:$JOB" "$RUN/job.sh"
fi
exit "$code"
