// Package clients has programs that get something by HTTPS, each in a way of its own to look for roots, and the pages
// that they ask for:
//
//	http.HandlerFunc(clients.Serve) // at a server
//	for _, c := range clients.In(root) {
//		output, ok := c.Try(run, "https://localhost:443/")
//	}
package clients

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// GoFile is a static program in a container. It knows the commands: package try has it, or the binary of a test has
// those that the test needs.
const GoFile = "/usr/local/bin/go-client"

// Get gets a URL with Go's default roots, as a program. It returns the exit code.
func Get(url string) int {
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

// Client is a program that gets something from a server. It succeeds if its exit code is 0 and it prints a word.
type Client struct {
	Name  string
	needs string // the path in the image without which the client is not there
	args  func(url string) []string
	env   []string
	input string
	word  string // `hello` if empty
}

// In returns the clients that are in the file system at a root, in the order of All.
func In(root string) (present []Client) {
	for _, c := range All {
		if _, err := os.Lstat(filepath.Join(root, c.needs)); err == nil {
			present = append(present, c)
		}
	}
	return present
}

// Label is the client's name as a label of a DNS name.
func (c Client) Label() string {
	words := strings.FieldsFunc(strings.ToLower(c.Name), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	return strings.Join(words, "-")
}

// Try runs a client for a URL, which has a port. ok says that it succeeded.
func (c Client) Try(
	run func(env []string, input string, args ...string) (string, error), url string,
) (output string, ok bool) {
	word := c.word
	if word == "" {
		word = "hello"
	}
	out, err := run(c.env, c.input, c.args(url)...)
	return out, err == nil && strings.Contains(out, word)
}

// words is a command whose last argument ends with the URL.
func words(args ...string) func(string) []string {
	last := len(args) - 1
	return func(url string) []string { return append(append([]string{}, args[:last]...), args[last]+url) }
}

// code is a command whose last argument is a program, in which %s stands for the URL.
func code(args ...string) func(string) []string {
	last := len(args) - 1
	return func(url string) []string {
		return append(append([]string{}, args[:last]...), strings.ReplaceAll(args[last], "%s", url))
	}
}

// OpenSSL returns a client that gets a page with the program openssl and these options.
func OpenSSL(name string, options ...string) Client {
	return Client{Name: name, input: request, args: sClient(options...)}
}

// sClient gets a page with openssl, which has the host and the port as one argument.
func sClient(options ...string) func(string) []string {
	return func(url string) []string {
		return append([]string{"/usr/bin/openssl", "s_client", "-quiet", "-verify_return_error",
			"-ignore_unexpected_eof", "-connect", address(url)}, options...)
	}
}

// address is the host and the port of a URL.
func address(url string) string { return strings.Trim(strings.TrimPrefix(url, "https:"), "/") }

// request is the input of clients for TLS alone.
const request = "GET / HTTP/1.0\r\n\r\n"

const (
	debianPython = "/usr/bin/python3"
	venv         = "/opt/venv/bin/"
)

// urllib gets a URL with a context of Python's ssl.
func urllib(context string) func(string) []string {
	return code(debianPython, "-c",
		"import ssl, urllib.request as u; print(u.urlopen('%s', context="+context+").read())")
}

// fetch is the program of JavaScript runtimes.
const fetch = "fetch('%s').then(r => r.text()).then(console.log)"

const aiohttp = `
import aiohttp, asyncio

async def get():
    async with aiohttp.ClientSession() as session:
        async with session.get('%s') as response:
            print(await response.text())

asyncio.run(get())`

const phpCurl = `
$request = curl_init('%s');
curl_setopt($request, CURLOPT_RETURNTRANSFER, true);
$page = curl_exec($request);
if ($page === false) {
    fwrite(STDERR, curl_error($request));
    exit(1);
}
echo $page;`

// Go is a program in Go, at GoFile.
var Go = Client{Name: "Go", needs: GoFile, args: words(GoFile, GetCommand, "")}

// All are the clients of the manual's table, in its order. Where two have the same program, or library, they look for
// roots in different ways.
var All = []Client{
	{Name: "curl", needs: "/usr/bin/curl", args: words("/usr/bin/curl", "-sS", "")},
	{Name: "wget", needs: "/usr/bin/wget", args: words("/usr/bin/wget", "-q", "-O", "-", "")},
	{Name: "git", needs: "/usr/bin/git", args: words("/usr/bin/git", "ls-remote", "")},
	{Name: "apt", needs: "/usr/lib/apt/apt-helper", args: func(url string) []string {
		return []string{"/usr/lib/apt/apt-helper", "-o", "Acquire::Retries=0",
			"-o", "APT::Sandbox::User=root", // not every container may change its user
			"download-file", url + "hello", "/tmp/apt"}
	}},
	{Name: "aria2", needs: "/usr/bin/aria2c", args: func(url string) []string {
		return []string{"/usr/bin/aria2c", "--no-conf", "--async-dns=false", "--dir=/tmp",
			"--allow-overwrite=true", url + "hello"}
	}},
	{Name: "openssl s_client", needs: "/usr/bin/openssl", input: request, args: sClient()},
	{Name: "gnutls-cli", needs: "/usr/bin/gnutls-cli", input: request, word: "The certificate is trusted",
		args: func(url string) []string {
			host, port, _ := strings.Cut(address(url), ":")
			return []string{"/usr/bin/gnutls-cli", "--port", port, host}
		}},
	{Name: "Python's ssl", needs: debianPython, args: urllib("ssl.create_default_context()")},
	{Name: "requests of Debian", needs: "/usr/lib/python3/dist-packages/requests",
		args: code(debianPython, "-c", "import requests; print(requests.get('%s').text)")},
	{Name: "requests", needs: venv + "python",
		args: code(venv+"python", "-c", "import requests; print(requests.get('%s').text)")},
	{Name: "httpx", needs: venv + "python",
		args: code(venv+"python", "-c", "import httpx; print(httpx.get('%s').text)")},
	{Name: "aiohttp", needs: venv + "python", args: code(venv+"python", "-c", aiohttp)},
	{Name: "certifi", needs: venv + "python", args: code(venv+"python", "-c",
		"import certifi, ssl, urllib.request as u; "+
			"print(u.urlopen('%s', context=ssl.create_default_context(cafile=certifi.where())).read())")},
	{Name: "pip", needs: venv + "python", args: code(venv+"python", "-m", "pip", "--no-cache-dir", "--retries=0",
		"download", "--no-deps", "--dest=/tmp/pip", "hello", "--index-url=%ssimple")},
	{Name: "uv", needs: venv + "uv", args: code(venv+"uv", "pip", "install", "--no-cache",
		"--python="+venv+"python", "--target=/tmp/uv", "hello", "--index-url=%ssimple"),
		env: []string{"UV_HTTP_RETRIES=0"}},
	{Name: "Node.js of Debian", needs: "/usr/bin/node", args: code("/usr/bin/node", "-e", fetch)},
	{Name: "Node.js", needs: "/usr/local/bin/node", args: code("/usr/local/bin/node", "-e", fetch)},
	{Name: "Deno", needs: venv + "deno", args: code(venv+"deno", "eval", fetch),
		env: []string{"DENO_DIR=/tmp/deno", "DENO_NO_UPDATE_CHECK=1"}},
	{Name: "Bun", needs: "/usr/local/bin/bun", args: code("/usr/local/bin/bun", "-e", fetch)},
	{Name: "Ruby", needs: "/usr/bin/ruby",
		args: words("/usr/bin/ruby", "-ropen-uri", "-e", "puts URI.open(ARGV[0]).read", "")},
	{Name: "PHP's curl", needs: "/usr/bin/php", args: code("/usr/bin/php", "-r", phpCurl)},
	{Name: "PHP's streams", needs: "/usr/bin/php", args: code("/usr/bin/php", "-r", "echo file_get_contents('%s');")},
	{Name: "Perl's LWP", needs: "/usr/bin/lwp-request", args: words("/usr/bin/lwp-request", "")},
	Go,
	{Name: "cargo", needs: "/usr/local/bin/cargo", args: code("/usr/local/bin/cargo", "search", "hello",
		"--index", "sparse+%sindex/"), env: []string{"CARGO_HOME=/tmp/cargo", "CARGO_NET_RETRY=0"}},
	{Name: "Java", needs: "/opt/java/Get.class", args: words("/usr/bin/java", "-Xint", "-cp", "/opt/java", "Get", "")},
}
