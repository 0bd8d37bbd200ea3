# shellcheck shell=sh disable=SC2094 # the script's input is no file that it writes
# Runs dockerd with arguments as the first process of a PID namespace, in a mount namespace: all processes of Docker end
# with it. It ends when dockerd does, or when its input ends because the process that started it is gone. Docker sees no
# /run and no /etc/docker but its own. The folder $1 comes first in its PATH. Run it with sh -eu.
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /etc/docker
mount -t tmpfs tmpfs /etc/docker
PATH=$1:$PATH
shift
exec 3<&0
dockerd "$@" 3<&- &
dockerd=$!
{
    cat <&3
    kill -KILL "$dockerd"
} &
wait "$dockerd"
