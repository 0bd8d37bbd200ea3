# shellcheck shell=bash disable=SC2154 # the script sets name, usage, bin and help
# For scripts that install things side by side, each into a folder below bin/. They set name, usage, bin and help, and
# read this file in.

# begin ARGUMENT… handles the arguments of a script that is called as `SCRIPT install THING…`, and leaves the things in
# the array things. Until the end it is the only one: it holds the lock. $new is a folder for what is not complete yet.
begin() {
    case ${1-} in
    install) shift ;;
    -h | --help) printf '%s\n%s\n' "$usage" "$help" && exit 0 ;;
    *) echo "$usage" >&2 && exit 2 ;;
    esac
    if (($# == 0)); then echo "$usage" >&2 && exit 2; fi
    # shellcheck disable=SC2034 # for the script
    things=("$@")
    mkdir -p "$bin"
    exec 9>"$bin/.lock"
    flock 9
    rm -rf "$bin"/.new.* # of a run that was killed
    new=$(mktemp -d "$bin/.new.XXXXXX")
    log=$bin/install.log
    trap 'rm -rf "$new"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

# say prints a line about the progress.
say() { echo "$name: $*"; }

# fail prints the reason of a failure, and the end of the log.
fail() {
    say "$*; the end of $log:" >&2
    tail -n 10 "$log" | sed 's/^/  | /' >&2
    return 1
}

# publish THING puts a finished thing into its place.
publish() {
    rm -rf "${bin:?}/$1"
    mv "$new/$1" "$bin/$1"
    say "$1 is in $bin/$1"
}

# can_bootstrap tells whether bootstrap can be called: it takes root and the package debootstrap.
can_bootstrap() { ((EUID == 0)) && PATH=$PATH:/usr/sbin command -v debootstrap >/dev/null; }

# bootstrap SUITE FOLDER PACKAGE… makes a Debian with the least packages and these in a new folder, without caches. It
# does so in a mount namespace of its own, so that no mount is left behind if it is killed.
bootstrap() {
    local suite=$1 folder=$2 packages
    shift 2
    packages=$(IFS=,; echo "$*")
    PATH=$PATH:/usr/sbin:/sbin unshare --mount \
        debootstrap --variant=minbase --include="$packages" "$suite" "$folder" && without_caches "$folder"
}

# add_packages FOLDER PACKAGE… installs packages with all that they depend on in the Debian in a folder. Scripts of
# packages read /proc, which is mounted in a mount namespace of its own.
add_packages() {
    local folder=$1
    shift
    # shellcheck disable=SC2016 # the inner shell expands it
    DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=$PATH:/usr/sbin:/sbin unshare --mount sh -ec '
        folder=$1
        shift
        mount -t proc proc "$folder/proc"
        chroot "$folder" apt-get -qq -o Acquire::Retries=3 update
        chroot "$folder" apt-get -qq install --no-install-recommends -o Acquire::Retries=3 "$@"
    ' - "$folder" "$@" && without_caches "$folder"
}

# without_caches FOLDER removes the downloaded packages and their lists.
without_caches() { rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*; }
