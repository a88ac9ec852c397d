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
mkdir -p .athanor/home .dvc/tmp

# All but the parameters, which are the volume's own from the first start on.
take() {
    touch .athanor/taking # gone when all is there: a kill in between is made good by the next start
    [ ! -e .athanor/image ] || code .athanor/image | xargs -d '\n' rm -f --
    [ ! -e params.yaml ] || set -- --exclude=./params.yaml
    tar -C "$image" --exclude=./.venv --exclude=./.image "$@" -cf - . | tar -xf -
    [ -e .git ] || git init -q -b main # a queued experiment needs a Git repository
    code "$image/.image" | xargs -d '\n' git add -- params.yaml
    git -c user.name=athanor -c user.email=athanor@localhost commit -q --allow-empty -am "code of the image"
    cp "$image/.image" .athanor/image
    rm .athanor/taking
}
code() { cut -c67- "$1" | grep -vxF ./params.yaml; }
untouched() { grep -v ' ./params.yaml$' .athanor/image | sha256sum --check --status 2>/dev/null; }

exec 9>.athanor/container.lock
if flock -n 9; then
    rm -f .dvc/tmp/rwlock
    if [ ! -e dvc.yaml ] || [ -e .athanor/taking ]; then
        take
    elif [ -e .athanor/image ] && ! cmp -s .athanor/image "$image/.image"; then
        if untouched; then
            take
        else
            echo "the code in this volume was edited and stays; for that of the image: git stash, and start again" >&2
        fi
    fi
fi
exec "$@"
