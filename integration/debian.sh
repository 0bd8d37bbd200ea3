# shellcheck shell=bash
# Functions that make the root of a Debian, for scripts to read in.

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
