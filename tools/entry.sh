#!/bin/sh
# Container entry, in the volume: bring the image's code there, clear a lock that an earlier container left, become the command.
# The flock tells whether another container works on the same volume; only when none does can the
# rwlock in DVC's temporary directory be stale for certain (its pids mean nothing in a new container).
set -eu
image=/opt/athanor

if [ ! -e dvc.yaml ] && ls -A | grep -qvxE '\.athanor|\.dvc|lost\+found'; then
    echo "the folder at $PWD is neither empty nor a checkout: mount another one" >&2
    exit 1
fi
mkdir -p .athanor/home .dvc/tmp data models

# The first time all that the image holds; later the code only: parameters and results are the volume's own.
take() {
    touch .athanor/taking # gone when all is there: a kill in between is made good by the next start
    if [ -e .athanor/image ]; then
        code .athanor/image | xargs -d '\n' rm -f --
        code "$image/.image" | tar -C "$image" -T - -cf - | tar -xf -
    else
        tar -C "$image" --exclude=./.venv --exclude=./.image -cf - . | tar -xf -
    fi
    [ -e .git ] || git init -q -b main # a queued experiment needs a Git repository
    git add -A
    git -c user.name=athanor -c user.email=athanor@localhost commit -q --allow-empty -m "code of the image"
    cp "$image/.image" .athanor/image
    rm .athanor/taking
}
code() { cut -c67- "$1"; }

exec 9>.athanor/container.lock
if flock -n 9; then
    rm -f .dvc/tmp/rwlock
    if [ ! -e dvc.yaml ] || [ -e .athanor/taking ]; then
        take
    elif [ -e .athanor/image ] && ! cmp -s .athanor/image "$image/.image"; then
        if sha256sum --check --status .athanor/image 2>/dev/null; then
            take
        else
            echo "the code in this volume was edited and stays; for that of the image: git stash, and start again" >&2
        fi
    fi
fi
exec "$@"
