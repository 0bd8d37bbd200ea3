package clients

import (
	"archive/zip"
	"bytes"
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"
)

// Serve serves a page, a git repository, an index of Python packages and a registry of cargo.
func Serve(w http.ResponseWriter, r *http.Request) {
	page := []byte("hello")
	switch base := path.Base(r.URL.Path); {
	case base == "refs":
		page = []byte(strings.Repeat("1", 40) + "\trefs/heads/hello\n")
	case strings.HasPrefix(r.URL.Path, "/simple/"):
		w.Header().Set("Content-Type", "text/html")
		page = []byte("<a href=/" + wheelName + ">" + wheelName + "</a>")
	case base == wheelName:
		page = wheel()
	case base == "config.json":
		page = fmt.Appendf(nil, `{"dl": "https://%s/dl", "api": "https://%[1]s"}`, r.Host)
	case base == "crates":
		page = []byte(`{"crates": [{"name": "hello", "max_version": "1.0.0"}], "meta": {"total": 1}}`)
	}
	_, _ = w.Write(page) // a client that has gone fails by itself
}

const wheelName = "hello-1.0-py3-none-any.whl"

// wheel is a Python package without a module.
var wheel = sync.OnceValue(func() []byte {
	var data bytes.Buffer
	archive := zip.NewWriter(&data)
	for _, file := range [][2]string{
		{"METADATA", "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n"},
		{"WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"RECORD", "hello-1.0.dist-info/METADATA,,\nhello-1.0.dist-info/WHEEL,,\nhello-1.0.dist-info/RECORD,,\n"},
	} {
		w, err := archive.Create("hello-1.0.dist-info/" + file[0])
		if err == nil {
			_, err = w.Write([]byte(file[1]))
		}
		if err != nil {
			panic(err) // memory does not fail
		}
	}
	if err := archive.Close(); err != nil {
		panic(err) // as above
	}
	return data.Bytes()
})
