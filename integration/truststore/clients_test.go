package truststore

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/plugin/truststore"
)

// getVariable names the URL that a test binary gets as a client of Go's.
const getVariable = "SLUICE_TEST_GET"

// goClient gets a URL with Go's default roots.
func goClient(url string) int {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = response.Body.Close() }() // only read
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

const (
	certifiFile = "/opt/venv/lib/python3.11/site-packages/certifi/cacert.pem"
	javaFile    = "/usr/local/share/Get.java"
	goFile      = "/usr/local/bin/go-client"
)

const getJava = `import java.net.*;
public class Get {
    public static void main(String[] a) throws Exception {
        System.out.write(new URL(a[0]).openStream().readAllBytes());
        System.out.flush();
    }
}
`

// client gets a URL and prints what it got. needs is a program of the image without which the client cannot run.
type client struct {
	name, needs string
	env         func(url string) []string
	args        func(url string) []string
}

// python gets a URL with a context for TLS.
func python(context string) func(string) []string {
	return func(url string) []string {
		return []string{"/usr/bin/python3", "-c", fmt.Sprintf(
			"import ssl, urllib.request as u; print(u.urlopen(%q, context=%s).read())", url, context)}
	}
}

// sClient gets a page with openssl, which has the host and the port as one argument.
func sClient(options string) func(string) []string {
	return func(url string) []string {
		address := strings.Trim(strings.TrimPrefix(url, "https:"), "/")
		const get = `printf 'GET / HTTP/1.0\r\n\r\n' | openssl s_client -quiet -verify_return_error `
		return []string{"sh", "-c", get + options + " -connect " + address}
	}
}

func words(args ...string) func(string) []string {
	return func(url string) []string { return append(append([]string{}, args...), url) }
}

var clients = []client{
	{name: "curl", needs: "curl", args: words("curl", "-sS")},
	{name: "wget", needs: "wget", args: words("wget", "-q", "-O", "-")},
	{name: "git", needs: "git", args: words("git", "ls-remote")},
	{name: "openssl, its default", needs: "openssl", args: sClient("")},
	{name: "openssl, a bundle", needs: "openssl",
		args: sClient("-no-CApath -no-CAstore -CAfile /etc/ssl/certs/ca-certificates.crt")},
	{name: "openssl, a directory", needs: "openssl", args: sClient("-no-CAfile -no-CAstore -CApath /etc/ssl/certs")},
	{name: "Python's ssl", needs: "/usr/bin/python3", args: python("ssl.create_default_context()")},
	{name: "Python with certifi", needs: "/usr/bin/python3",
		args: python(fmt.Sprintf("ssl.create_default_context(cafile=%q)", certifiFile))},
	{name: "Perl's LWP", needs: "lwp-request", args: words("lwp-request")},
	{name: "Java", needs: "java", args: words("java", "-Xint", javaFile)},
	goGet,
}

// goGet is the test binary itself.
var goGet = client{
	name: "Go", needs: goFile, args: words(goFile),
	env: func(url string) []string { return []string{getVariable + "=" + url} },
}

// try runs a client in a container. ok says that it got the page.
func (c *container) try(client client, url string) (output string, ok bool) {
	var env []string
	if client.env != nil {
		env = client.env(url)
	}
	out, err := c.command(env, client.args(url)...).CombinedOutput()
	return string(out), err == nil && strings.Contains(string(out), "hello")
}

// equip gives a container the stores and the programs that its image does not have.
func (c *container) equip() {
	c.t.Helper()
	bundle, err := os.ReadFile(filepath.Join(c.root, "/etc/ssl/certs/ca-certificates.crt"))
	c.must(err)
	c.write(certifiFile, string(bundle))
	c.write(javaFile, getJava)
	self, err := os.ReadFile("/proc/self/exe")
	c.must(err)
	c.write(goFile, string(self))
	c.must(os.Chmod(filepath.Join(c.root, goFile), 0o755))
}

// images are the roots that the machine has.
func images(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{"this machine": "/"}
	const trixie = "/tmp/trixie"
	if _, err := os.Stat(trixie + "/etc/ssl/certs/ca-certificates.crt"); err == nil {
		found["Debian 13"] = trixie
	}
	return found
}

// TestClients: no client of an image trusts the CA before the hook, every client does afterwards, and
// update-ca-certificates keeps the CA.
func TestClients(t *testing.T) {
	ca := newAuthority(t)
	for name, lower := range images(t) {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t, lower)
			c.equip()
			present := c.clients()
			for _, client := range present {
				if out, ok := c.try(client, ca.url); ok {
					t.Errorf("%s trusts the CA before the hook: %s", client.name, out)
				}
			}
			report := c.hook(ca.pem)
			if report.State != truststore.Trusted {
				t.Errorf("got %+v", report)
			}
			c.wantTrust(present, ca.url)
			if c.has("update-ca-certificates") {
				for _, args := range [][]string{{"update-ca-certificates"}, {"update-ca-certificates", "--fresh"}} {
					out, err := c.command(nil, args...).CombinedOutput()
					if err != nil {
						t.Fatalf("%v: %v\n%s", args, err, out)
					}
					c.wantTrust(present, ca.url)
				}
			}
		})
	}
}

// clients are the clients that the container can run.
func (c *container) clients() []client {
	c.t.Helper()
	var present []client
	for _, client := range clients {
		if c.has(client.needs) {
			present = append(present, client)
		} else {
			c.t.Logf("not in this image: %s", client.name)
		}
	}
	return present
}

func (c *container) wantTrust(clients []client, url string) {
	c.t.Helper()
	for _, client := range clients {
		if out, ok := c.try(client, url); !ok {
			c.t.Errorf("%s does not trust the CA: %s", client.name, out)
		}
	}
}
