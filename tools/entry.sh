#!/bin/sh
# Container entry: clear a lock that an earlier container left behind, then become the command.
# The flock tells whether another container works on the same volume; only when none does can the
# rwlock in DVC's temporary directory be stale for certain (its pids mean nothing in a new container).
set -eu
mkdir -p .athanor .dvc/tmp
exec 9>.athanor/container.lock
if flock -n 9; then
    rm -f .dvc/tmp/rwlock
fi
exec "$@"
