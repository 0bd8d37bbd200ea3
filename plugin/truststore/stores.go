package truststore

import "slices"

// MachineBundles are the paths of the machine's bundle in PEM, in Go's order (crypto/x509, root_linux.go).
var MachineBundles = []string{
	debianBundle,              // Debian, Ubuntu, Gentoo, Alpine, Arch, distroless
	fedoraBundle,              // Fedora, RHEL
	"/etc/ssl/ca-bundle.pem",  // SUSE
	"/etc/pki/tls/cacert.pem", // OpenELEC
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // RHEL 7 and later
	"/etc/ssl/cert.pem", // Alpine's LibreSSL and OpenSSL
}

// bundles are the paths of all bundles in PEM: also those from which the distributions link to the machine's, or which
// their OpenSSL reads by default.
var bundles = append(slices.Clip(MachineBundles),
	"/etc/pki/tls/cert.pem",                  // RHEL's OpenSSL
	"/etc/pki/tls/certs/ca-bundle.trust.crt", // RHEL's OpenSSL, with trust attributes
	"/etc/pki/ca-trust/extracted/openssl/ca-bundle.trust.crt",
	"/var/lib/ca-certificates/ca-bundle.pem",           // SUSE
	"/etc/ca-certificates/extracted/tls-ca-bundle.pem", // Arch
	"/etc/ssl/certs/ca-bundle.crt",                     // NixOS
	"/nix/var/nix/profiles/default/etc/ssl/certs/ca-bundle.crt",
	"/usr/lib/ssl/cert.pem",   // Debian's OpenSSL
	"/usr/local/ssl/cert.pem", // OpenSSL built from source
	"/usr/local/etc/openssl/cert.pem",
	"/opt/conda/ssl/cacert.pem",
	"/opt/homebrew/etc/ca-certificates/cert.pem",
	"/home/linuxbrew/.linuxbrew/etc/ca-certificates/cert.pem",
)

const (
	debianBundle = "/etc/ssl/certs/ca-certificates.crt"
	fedoraBundle = "/etc/pki/tls/certs/ca-bundle.crt"
)

// directories are the paths of hashed directories.
var directories = []string{
	"/etc/ssl/certs",     // Debian, Alpine; SUSE links to pem below
	"/etc/pki/tls/certs", // Fedora 43 and later link to directory-hash below
	"/etc/pki/ca-trust/extracted/pem/directory-hash", // Fedora
	"/var/lib/ca-certificates/pem",                   // SUSE
	"/var/lib/ca-certificates/openssl",               // SUSE's OpenSSL
	"/etc/ca-certificates/extracted/cadir",           // Arch
	"/usr/local/ssl/certs",                           // OpenSSL built from source
}

// javaKeystores are patterns of the paths of Java's keystore of CAs.
var javaKeystores = []string{
	"/etc/ssl/certs/java/cacerts",              // Debian; its JVMs link to it
	"/etc/pki/ca-trust/extracted/java/cacerts", // RHEL, Alpine
	"/etc/pki/java/cacerts",
	"/var/lib/ca-certificates/java-cacerts",           // SUSE
	"/etc/ca-certificates/extracted/java-cacerts.jks", // Arch
	"/opt/java/openjdk/lib/security/cacerts",          // Temurin's images
	"/opt/java/openjdk/jre/lib/security/cacerts",
	"/opt/java/*/lib/security/cacerts",
	"/usr/lib/jvm/*/lib/security/cacerts",
	"/usr/lib/jvm/*/jre/lib/security/cacerts",   // Java 8
	"/usr/java/*/lib/security/cacerts",          // Oracle's images
	"/usr/local/openjdk-*/lib/security/cacerts", // the older official images
	"/usr/local/openjdk-*/jre/lib/security/cacerts",
	"/opt/jdk*/lib/security/cacerts",
	"/opt/openjdk*/lib/security/cacerts",
	"/opt/*/lib/security/cacerts",
	"/opt/bitnami/java/lib/security/cacerts",
	"/root/.sdkman/candidates/java/*/lib/security/cacerts",
	"/usr/local/sdkman/candidates/java/*/lib/security/cacerts",
}

// anchor is a folder from which the tools of a distribution put certificates into its stores.
type anchor struct {
	folder    string
	extension string
	// needs are paths of which one exists where the tools can come to read the folder. The folder is made if it does
	// not exist: `apt-get install ca-certificates` in an image without stores is to find the CA.
	needs []string
}

var anchors = []anchor{
	{ // Debian, Alpine
		folder: "/usr/local/share/ca-certificates", extension: ".crt",
		needs: []string{"/usr/bin/dpkg", "/sbin/apk", "/usr/bin/apk", "/usr/sbin/update-ca-certificates"},
	},
	{ // Fedora, RHEL
		folder: "/etc/pki/ca-trust/source/anchors", extension: ".pem",
		needs: []string{"/etc/pki/ca-trust/source", "/usr/bin/update-ca-trust"},
	},
	{ // SUSE
		folder: "/etc/pki/trust/anchors", extension: ".pem",
		needs: []string{"/etc/pki/trust", "/usr/share/pki/trust"},
	},
	{ // Arch
		folder: "/etc/ca-certificates/trust-source/anchors", extension: ".pem",
		needs: []string{"/etc/ca-certificates/trust-source"},
	},
}
