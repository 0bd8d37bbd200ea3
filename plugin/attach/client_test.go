package attach_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-cni/sluice/plugin/attach"
	"github.com/sluice-cni/sluice/plugin/ruleset"
)

// daemon serves a unix socket with handle and returns a client of it.
func daemon(t *testing.T, handle http.HandlerFunc) *attach.Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: handle}}
	s.Start()
	t.Cleanup(s.Close)
	return attach.NewClient(socket)
}

func answer(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

func TestClientAttach(t *testing.T) {
	t.Parallel()
	want := record("4f2a", "eth0").Attachment
	r := ruleset.Provisional("eth0")
	type request struct{ method, path, body string }
	got := make(chan request, 1)
	c := daemon(t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		got <- request{req.Method, req.URL.Path, string(body)}
		_ = json.NewEncoder(w).Encode(attach.Decision{Capture: true, Ruleset: &r, Reason: "because"})
	})
	d, err := c.Attach(t.Context(), want)
	if err != nil || !d.Capture || d.Ruleset == nil || d.Reason != "because" {
		t.Errorf("Attach: got %+v, %v", d, err)
	}
	body, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := <-got, (request{"POST", "/v1/attachments", string(body)}); g != w {
		t.Errorf("request: got %v, want %v", g, w)
	}
}

func TestClientDetach(t *testing.T) {
	t.Parallel()
	got := make(chan string, 1)
	c := daemon(t, func(w http.ResponseWriter, req *http.Request) {
		got <- req.Method + " " + req.RequestURI
		_, _ = io.WriteString(w, "{}")
	})
	if err := c.Detach(t.Context(), attach.ID{ContainerID: "4f2a", IfName: "eth0:1"}); err != nil {
		t.Errorf("Detach: %v", err)
	}
	if g, w := <-got, "DELETE /v1/attachments/4f2a/eth0:1"; g != w {
		t.Errorf("request: got %q, want %q", g, w)
	}
}

func TestClientStatus(t *testing.T) {
	t.Parallel()
	want := attach.Status{
		Upstream: attach.UpstreamStatus{Address: "127.0.0.1:18080", Protocol: "connect", Ready: true},
		Attachments: []attach.AttachmentStatus{
			{Pod: "ci/web-0", Attachment: "4f2a/eth0", State: attach.Captured, Waiting: 2},
		},
	}
	c := daemon(t, func(w http.ResponseWriter, req *http.Request) {
		var v any = want
		if req.URL.Path == attach.PathAttachments {
			v = want.Attachments
		}
		_ = json.NewEncoder(w).Encode(v)
	})
	s, err := c.Status(t.Context())
	if diff := cmp.Diff(want, s); diff != "" || err != nil {
		t.Errorf("Status: %v (-want +got):\n%s", err, diff)
	}
	l, err := c.List(t.Context())
	if diff := cmp.Diff(want.Attachments, l); diff != "" || err != nil {
		t.Errorf("List: %v (-want +got):\n%s", err, diff)
	}
}

func TestClientIsRefused(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		code int
		body string
		want attach.RefusedError
	}{
		{422, `{"error":"bad annotation","final":true}`, attach.RefusedError{Message: "bad annotation", Final: true}},
		{503, `{"error":"port is taken","final":false}`, attach.RefusedError{Message: "port is taken"}},
		{503, `{"error":"port is taken"}`, attach.RefusedError{Message: "port is taken"}},
	} {
		c := daemon(t, answer(tc.code, tc.body))
		_, err := c.Attach(t.Context(), record("4f2a", "eth0").Attachment)
		var got *attach.RefusedError
		if !errors.As(err, &got) || *got != tc.want || errors.Is(err, attach.ErrDaemonDown) {
			t.Errorf("%d %s: got %#v, want %#v", tc.code, tc.body, err, tc.want)
		}
	}
}

// TestClientTakesInvalidAnswersForDown: no invalid answer is read as a decision, above all not as "not captured".
func TestClientTakesInvalidAnswersForDown(t *testing.T) {
	t.Parallel()
	for name, handle := range map[string]http.HandlerFunc{
		"404 of another server":    answer(404, "404 page not found\n"),
		"500 without a body":       answer(500, ""),
		"an error without message": answer(503, `{"final":true}`),
		"503 in HTML":              answer(503, "<html>"),
		"not JSON":                 answer(200, "hello"),
		"an empty body":            answer(200, ""),
		"cut off":                  answer(200, `{"capture":false,`),
		"another type":             answer(200, `{"capture":"no"}`),
		"capture without ruleset":  answer(200, `{"capture":true}`),
		"a bad ruleset":            answer(200, `{"capture":true,"ruleset":{"includePorts":["0"]}}`),
		"no answer":                func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"closed in the body": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, `{"capture":`)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, err := daemon(t, handle).Attach(t.Context(), record("4f2a", "eth0").Attachment)
			if !errors.Is(err, attach.ErrDaemonDown) {
				t.Errorf("got %+v, %v; want ErrDaemonDown", d, err)
			}
		})
	}
}

// TestClientTakesAnswersWithoutDecisionForDown: valid JSON without a reason is not a decision.
func TestClientTakesAnswersWithoutDecisionForDown(t *testing.T) {
	t.Parallel()
	for _, body := range []string{`{}`, `null`, `{"error":"?"}`} {
		d, err := daemon(t, answer(200, body)).Attach(t.Context(), record("4f2a", "eth0").Attachment)
		if !errors.Is(err, attach.ErrDaemonDown) {
			t.Errorf("%s: got %+v, %v; want ErrDaemonDown", body, d, err)
		}
	}
}

func TestClientWithoutDaemon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stale := filepath.Join(dir, "left-behind")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for name, socket := range map[string]string{
		"no socket": filepath.Join(dir, "none"), "no listener": stale, "a directory": dir,
	} {
		_, err := attach.NewClient(socket).Status(t.Context())
		if !errors.Is(err, attach.ErrDaemonDown) {
			t.Errorf("%s: got %v, want ErrDaemonDown", name, err)
			continue
		}
		if text := err.Error(); !strings.Contains(text, socket) || strings.Contains(text, "http://") {
			t.Errorf("%s: got %q, want the path %s and no URL", name, text, socket)
		}
	}
}

func TestClientOfADaemonThatHangs(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{})
	end := make(chan struct{})
	c := daemon(t, func(http.ResponseWriter, *http.Request) {
		close(asked)
		<-end
	})
	t.Cleanup(func() { close(end) })
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := c.Attach(ctx, record("4f2a", "eth0").Attachment); !errors.Is(err, attach.ErrDaemonDown) {
		t.Errorf("got %v, want ErrDaemonDown", err)
	}
}

// TestClientOfADaemonThatDoesNotAccept: the daemon is stopped, or has only just started.
func TestClientOfADaemonThatDoesNotAccept(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // it was not used
	ctx, cancel := context.WithCancel(t.Context())
	c := attach.NewClient(socket)
	done := make(chan error)
	go func() {
		_, err := c.Status(ctx)
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, attach.ErrDaemonDown) {
		t.Errorf("got %v, want ErrDaemonDown", err)
	}
}
