#!/usr/bin/env bash
# Installs versions of mitmproxy side by side, into bin/mitmproxy/VERSION/. Each has the programs mitmdump and mitmweb,
# which run in any network namespace and folder. Prints nothing if all are installed.
set -euo pipefail

name=mitmproxy
usage="usage: $0 install VERSION…"
help="Installs versions of mitmproxy into bin/mitmproxy/VERSION/, each with mitmdump and mitmweb. VERSION is one of
  8.1.1     the package of Debian 12, which is only linked to
  12.3.1    or another release, from PyPI
  main      mitmproxy's development branch, from GitHub; left out where GitHub cannot be reached
  default   the newest release for the Python of this machine; Debian's package where PyPI cannot be reached.
            To get a newer one later, remove bin/mitmproxy/default.
Releases from 11.1 on and the development branch need Python 3.12. They get that of a Debian 13, which debootstrap makes
in bin/mitmproxy/debian13. That takes root and a few minutes, once."
here=$(cd "$(dirname "$0")" && pwd)
bin=$(dirname "$here")/bin/mitmproxy
# shellcheck source=integration/installer.sh
. "$here/installer.sh"
root=$bin/debian13 # has the Python for versions that many machines' Python is too old for

main() {
    begin "$@"
    local failed=0 version
    for version in "${things[@]}"; do
        installed "$version" || install "$version" || failed=1
    done
    exit "$failed"
}

# installed VERSION tells whether a version can run: its Python may have been removed since, or the repository moved.
installed() {
    case $1 in
    8.1.1) [[ -x $bin/$1/mitmdump ]] ;;
    *) [[ -x $bin/$1/mitmdump ]] && "$bin/$1/venv/bin/python" -c '' 2>/dev/null ;;
    esac
}

install() {
    : >"$log"
    case $1 in
    8.1.1) link_debian ;;
    main) install_release "$1" https://github.com/mitmproxy/mitmproxy/archive/refs/heads/main.tar.gz ||
        say "the development branch is left out" ;;
    default) install_default ;;
    *) install_release "$1" "mitmproxy==$1" ;;
    esac
}

# link_debian links to Debian's package, if it has the version.
link_debian() {
    # grep -q would end at the line, and mitmdump would fail with a broken pipe.
    if ! /usr/bin/mitmdump --version 2>>"$log" | grep -x 'Mitmproxy: 8\.1\.1' >>"$log"; then
        fail "/usr/bin/mitmdump is not 8.1.1, which the package mitmproxy of Debian 12 is"
        return 1
    fi
    mkdir "$new/8.1.1"
    ln -s /usr/bin/mitmdump /usr/bin/mitmweb "$new/8.1.1/"
    publish 8.1.1
}

# install_default installs the newest release that the machine's Python can have.
install_default() {
    say "installing the newest release for $(python3 --version)"
    if ! make_venv python3 || ! pip mitmproxy; then
        say "PyPI cannot be reached or has no release for this Python (see $log): Debian's package takes its place"
        rm -rf "$new/venv"
        return 0
    fi
    add_programs default
}

# install_release VERSION REQUIREMENT installs a requirement of pip as VERSION.
install_release() {
    say "installing $1"
    rm -rf "$new/venv"
    local python=python3
    if [[ $(printf '%s\n' 11.1 "$1" | sort -V | tail -n 1) == "$1" ]]; then # `main` sorts behind all numbers
        make_root || return 1
        python=
    fi
    make_venv "$python" || { fail "no virtual environment for $1" || return 1; }
    pip "$2" || without_certifi "$2" || { fail "could not install $1" || return 1; }
    add_programs "$1"
}

# make_venv PYTHON makes an empty virtual environment with pip in $new/venv. Without PYTHON it has that of the root.
make_venv() {
    if [[ -n $1 ]]; then
        "$1" -m venv "$new/venv" >>"$log" 2>&1
        return
    fi
    # The root's Python runs without chroot, on the root's libraries. So paths, mounts and signals are the machine's.
    local loader python library
    loader=$(compgen -G "$root/lib*/ld-linux*.so.*" | head -n 1)
    library=$(compgen -G "$root/usr/lib/*-linux-gnu" | head -n 1)
    python=$(readlink -f "$root/usr/bin/python3")
    mkdir -p "$new/venv/bin"
    printf 'home = %s\ninclude-system-site-packages = false\n' "$root/usr/bin" >"$new/venv/pyvenv.cfg"
    # Python finds the virtual environment by its argv[0].
    cat >"$new/venv/bin/python" <<END
#!/bin/sh
exec "$loader" --argv0 "\$0" --library-path "$library" "$python" "\$@"
END
    chmod 755 "$new/venv/bin/python"
    "$new/venv/bin/python" "$(compgen -G "$root/usr/share/python-wheels/pip-*.whl")/pip" install -q --no-index \
        --find-links "$root/usr/share/python-wheels" pip >>"$log" 2>&1
}

# pip ARGUMENT… runs `pip install` in the virtual environment. It retries less than by default: where PyPI cannot be
# reached, this is known soon.
pip() {
    "$new/venv/bin/python" -m pip --disable-pip-version-check --retries 2 install -q "$@" >>"$log" 2>&1
}

# without_certifi REQUIREMENT installs a release that asks for a certifi newer than any that can be had, with another
# certifi. 12.3.1 asked for one of the day of its release, which some mirrors of PyPI do not have yet.
without_certifi() {
    grep -q 'No matching distribution found for certifi' "$log" || return 1
    say "no certifi is as new as $1 asks for: it gets an older one"
    pip --no-deps "$1" || return 1
    local needs
    mapfile -t needs < <("$new/venv/bin/python" - <<'END'
from importlib.metadata import requires

for line in requires("mitmproxy"):
    if "extra ==" not in line:
        print("certifi" if line.startswith("certifi") else line)
END
    )
    pip "${needs[@]}"
}

# make_root makes a Debian 13, unless it is there.
make_root() {
    if [[ -d $root ]]; then return; fi
    if ! can_bootstrap; then
        say "a Debian 13 for its Python takes root and debootstrap (integration/setup.sh test-mitmproxy)" >&2
        return 1
    fi
    say "installing a Debian 13 into $root, for its Python; this takes minutes"
    if ! bootstrap trixie "$new/root" python3 python3-pip-whl >>"$log" 2>&1; then
        fail "debootstrap has failed"
        return 1
    fi
    mv "$new/root" "$root"
}

# add_programs VERSION writes the programs beside the virtual environment, and publishes them.
add_programs() {
    mkdir "$new/$1"
    mv "$new/venv" "$new/$1/venv"
    local program
    for program in mitmdump mitmweb; do
        # pip's own scripts name the Python of the folder that had the environment before it was renamed.
        cat >"$new/$1/$program" <<'END'
#!/bin/sh
venv=$(dirname "$(readlink -f "$0")")/venv
exec "$venv/bin/python" "$venv/bin/$(basename "$0")" "$@"
END
        chmod 755 "$new/$1/$program"
    done
    "$new/$1/mitmdump" --version >>"$log" 2>&1 || { fail "$1 does not run" || return 1; }
    publish "$1"
}

main "$@"
