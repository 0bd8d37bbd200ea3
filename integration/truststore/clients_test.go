package truststore

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// goCommand is the first argument of a test binary that gets a URL as a client of Go's.
const goCommand = "get"

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

// goFile is the test binary in a container.
const goFile = "/usr/local/bin/go-client"

// client is a program that gets something from the server of an authority. It succeeds if its exit code is 0 and it
// prints a word.
type client struct {
	name  string
	needs string // the path in the image without which the client is not there
	args  func(url string) []string
	env   []string
	input string
	word  string // `hello` if empty
}

// try runs a client. ok says that it succeeded.
func (c client) try(
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

// sClient gets a page with openssl, which has the host and the port as one argument.
func sClient(options ...string) func(string) []string {
	return func(url string) []string {
		address := strings.Trim(strings.TrimPrefix(url, "https:"), "/")
		return append([]string{"/usr/bin/openssl", "s_client", "-quiet", "-verify_return_error",
			"-ignore_unexpected_eof", "-connect", address}, options...)
	}
}

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

var goGet = client{name: "Go", args: words(goFile, goCommand, "")}

// clients are the clients of the table, in its order. Where two have the same program, or library, they look for roots
// in different ways.
var clients = []client{
	{name: "curl", needs: "/usr/bin/curl", args: words("/usr/bin/curl", "-sS", "")},
	{name: "wget", needs: "/usr/bin/wget", args: words("/usr/bin/wget", "-q", "-O", "-", "")},
	{name: "git", needs: "/usr/bin/git", args: words("/usr/bin/git", "ls-remote", "")},
	{name: "apt", needs: "/usr/lib/apt/apt-helper", args: func(url string) []string {
		return []string{"/usr/lib/apt/apt-helper", "-o", "Acquire::Retries=0", "download-file",
			url + "hello", "/tmp/apt"}
	}},
	{name: "aria2", needs: "/usr/bin/aria2c", args: func(url string) []string {
		return []string{"/usr/bin/aria2c", "--no-conf", "--async-dns=false", "--dir=/tmp",
			"--allow-overwrite=true", url + "hello"}
	}},
	{name: "openssl s_client", needs: "/usr/bin/openssl", input: request, args: sClient()},
	{name: "gnutls-cli", needs: "/usr/bin/gnutls-cli", input: request, word: "The certificate is trusted",
		args: func(url string) []string {
			port := strings.Trim(url[strings.LastIndex(url, ":"):], ":/")
			return []string{"/usr/bin/gnutls-cli", "--port", port, "localhost"}
		}},
	{name: "Python's ssl", needs: debianPython, args: urllib("ssl.create_default_context()")},
	{name: "requests of Debian", needs: "/usr/lib/python3/dist-packages/requests",
		args: code(debianPython, "-c", "import requests; print(requests.get('%s').text)")},
	{name: "requests", needs: venv + "python",
		args: code(venv+"python", "-c", "import requests; print(requests.get('%s').text)")},
	{name: "httpx", needs: venv + "python",
		args: code(venv+"python", "-c", "import httpx; print(httpx.get('%s').text)")},
	{name: "aiohttp", needs: venv + "python", args: code(venv+"python", "-c", aiohttp)},
	{name: "certifi", needs: venv + "python", args: code(venv+"python", "-c",
		"import certifi, ssl, urllib.request as u; "+
			"print(u.urlopen('%s', context=ssl.create_default_context(cafile=certifi.where())).read())")},
	{name: "pip", needs: venv + "python", args: code(venv+"python", "-m", "pip", "--no-cache-dir", "--retries=0",
		"download", "--no-deps", "--dest=/tmp/pip", "hello", "--index-url=%ssimple")},
	{name: "uv", needs: venv + "uv", args: code(venv+"uv", "pip", "install", "--no-cache",
		"--python="+venv+"python", "--target=/tmp/uv", "hello", "--index-url=%ssimple"),
		env: []string{"UV_HTTP_RETRIES=0"}},
	{name: "Node.js of Debian", needs: "/usr/bin/node", args: code("/usr/bin/node", "-e", fetch)},
	{name: "Node.js", needs: "/usr/local/bin/node", args: code("/usr/local/bin/node", "-e", fetch)},
	{name: "Deno", needs: venv + "deno", args: code(venv+"deno", "eval", fetch),
		env: []string{"DENO_DIR=/tmp/deno", "DENO_NO_UPDATE_CHECK=1"}},
	{name: "Bun", needs: "/usr/local/bin/bun", args: code("/usr/local/bin/bun", "-e", fetch)},
	{name: "Ruby", needs: "/usr/bin/ruby",
		args: words("/usr/bin/ruby", "-ropen-uri", "-e", "puts URI.open(ARGV[0]).read", "")},
	{name: "PHP's curl", needs: "/usr/bin/php", args: code("/usr/bin/php", "-r", phpCurl)},
	{name: "PHP's streams", needs: "/usr/bin/php", args: code("/usr/bin/php", "-r", "echo file_get_contents('%s');")},
	{name: "Perl's LWP", needs: "/usr/bin/lwp-request", args: words("/usr/bin/lwp-request", "")},
	goGet,
	{name: "cargo", needs: "/usr/local/bin/cargo", args: code("/usr/local/bin/cargo", "search", "hello",
		"--index", "sparse+%sindex/"), env: []string{"CARGO_HOME=/tmp/cargo", "CARGO_NET_RETRY=0"}},
	{name: "Java", needs: "/opt/java/Get.class", args: words("/usr/bin/java", "-Xint", "-cp", "/opt/java", "Get", "")},
}
