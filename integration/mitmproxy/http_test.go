package mitmproxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/websocket"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// web is a server that serves HTTP with a handler, with a certificate HTTPS, by HTTP/1 or HTTP/2.
type web struct {
	handler http.HandlerFunc
	secure  bool
}

// serve serves at an address until the test ends. Its clients see all that can go wrong, so it has no outcome.
func (w web) serve(_ context.Context, h *testbed.Host, address string, config *tls.Config) <-chan error {
	s := &http.Server{Handler: w.handler, ReadHeaderTimeout: time.Minute, TLSConfig: config.Clone()}
	l := h.Listen(address)
	go func() {
		if w.secure {
			_ = s.ServeTLS(l, "", "") // ends with the listener
		} else {
			_ = s.Serve(l) // likewise
		}
	}()
	done := make(chan error, 1)
	done <- nil
	return done
}

// browse returns a step in which use makes HTTP requests on the connection.
func browse(use func(*http.Client) error) func(*talk) error {
	return func(c *talk) error {
		var dialled atomic.Bool
		transport := &http.Transport{
			TLSClientConfig: c.config.Clone(), ForceAttemptHTTP2: true,
			DialContext: func(context.Context, string, string) (net.Conn, error) {
				if dialled.Swap(true) {
					return nil, errors.New("the connection was not kept alive")
				}
				return c.tcp, nil
			},
		}
		defer transport.CloseIdleConnections()
		return use(&http.Client{Transport: transport})
	}
}

// get returns a step that asks for pages, one after the other on the same connection, by this version of HTTP.
func get(version int, urls ...string) func(*talk) error {
	return browse(func(client *http.Client) error {
		var protocols http.Protocols
		protocols.SetHTTP1(version == 1)
		protocols.SetHTTP2(version == 2)
		client.Transport.(*http.Transport).Protocols = &protocols
		for _, url := range urls {
			if err := getPage(client, version, url); err != nil {
				return err
			}
		}
		return nil
	})
}

// getPage asks for a page. All that can block has the deadline of the connection.
func getPage(client *http.Client, version int, url string) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || resp.ProtoMajor != version ||
		!strings.Contains(string(body), site) {
		return fmt.Errorf("%s: got %s %s, %q, %w; want a page by HTTP/%d",
			url, resp.Proto, resp.Status, body, err, version)
	}
	return nil
}

// streams is how many streams of HTTP/2 are open at the same time.
const streams = 100

// together answers requests when all streams have asked.
type together struct {
	asked atomic.Int64
	all   chan struct{}
}

func (s *together) answer(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/together" {
		tellRequest(w, r)
		return
	}
	if s.asked.Add(1) == streams {
		close(s.all)
	}
	select {
	case <-s.all:
		tellRequest(w, r)
	case <-r.Context().Done():
	}
}

func (s *together) ask(client *http.Client) error {
	// Without a connection, each of the requests would make one.
	if err := getPage(client, 2, "https://"+site+"/first"); err != nil {
		return err
	}
	outcome := make(chan error, streams)
	for range streams {
		go func() { outcome <- getPage(client, 2, "https://"+site+"/together") }()
	}
	var errs error
	for range streams {
		errs = errors.Join(errs, <-outcome)
	}
	return errs
}

// events sends server-sent events. Each goes out when the client has read the one before.
type events chan struct{}

const eventCount = 3

func (e events) send(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range eventCount {
		fmt.Fprintf(w, "data: %d\n\n", i)
		_ = http.NewResponseController(w).Flush() // the client misses the event
		select {
		case <-e:
		case <-r.Context().Done():
			return
		}
	}
}

func (e events) read(client *http.Client) error {
	resp, err := client.Get("http://" + site + "/events")
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	in := bufio.NewReader(resp.Body)
	for i := range eventCount {
		want := fmt.Sprintf("data: %d\n\n", i)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(in, got); err != nil || string(got) != want {
			return fmt.Errorf("event %d: got %q, %w", i, got, err)
		}
		e <- struct{}{}
	}
	return nil
}

// echoFrames answers each frame of a stream with the same frame, as a method of gRPC does that streams both ways.
func echoFrames(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Trailer", "Grpc-Status")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	_ = out.Flush() // the client misses the headers
	frame := make([]byte, frameSize)
	for {
		if _, err := io.ReadFull(r.Body, frame); err != nil {
			break // the client has ended its side, or it misses a frame
		}
		_, _ = w.Write(frame) // the client misses the frame
		_ = out.Flush()       // likewise
	}
	w.Header().Set("Grpc-Status", "0")
}

// A frame of gRPC is a byte, a length of four, and a message.
const (
	frameHead = "\x00\x00\x00\x00\x05"
	frameSize = 10
)

// exchangeFrames sends frames, each when the answer to the one before has come.
func exchangeFrames(client *http.Client) error {
	in, out := io.Pipe()
	defer out.Close() //nolint:errcheck // the server has answered
	req, err := http.NewRequest(http.MethodPost, "https://"+site+"/echo.Echo/Both", in)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("TE", "trailers")
	send := func(frame int) string {
		text := frameHead + fmt.Sprintf("%05d", frame)
		_, _ = io.WriteString(out, text) // the server misses the frame
		return text
	}
	go send(0) // mitmproxy passes on no request without a byte of its body
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	got := make([]byte, frameSize)
	frame := frameHead + "00000"
	for i := range 10 {
		if i > 0 {
			frame = send(i)
		}
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != frame {
			return fmt.Errorf("frame %d: got %q, %w", i, got, err)
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	if _, err := io.ReadAll(resp.Body); err != nil || resp.Trailer.Get("Grpc-Status") != "0" {
		return fmt.Errorf("got the trailer %v, %w; want Grpc-Status 0", resp.Trailer, err)
	}
	return nil
}

// echoMessages is a WebSocket server.
func echoMessages(w http.ResponseWriter, r *http.Request) {
	websocket.Server{Handler: func(c *websocket.Conn) { _, _ = io.Copy(c, c) }}.ServeHTTP(w, r)
}

// exchangeMessages speaks WebSocket.
func exchangeMessages(c *talk) error {
	config, err := websocket.NewConfig("ws://"+site+"/echo", "http://"+site)
	if err != nil {
		return err
	}
	conn, err := websocket.NewClient(config, c)
	if err != nil {
		return fmt.Errorf("WebSocket: %w", err)
	}
	for i := range 10 {
		var got string
		sent := fmt.Sprint("message ", i)
		err := errors.Join(websocket.Message.Send(conn, sent), websocket.Message.Receive(conn, &got))
		if err != nil || got != sent {
			return fmt.Errorf("got %q, %w; want %q", got, err, sent)
		}
	}
	return nil
}

// bulk is the size of a large body.
const bulk = 200 << 20

// chunk is a part of a large body. Its length has no divisor in common with the sizes of buffers.
var chunk = sync.OnceValue(func() []byte { return testbed.RandomBytes(1<<20 + 1) })

// body is bulk bytes.
func body() io.Reader { return io.LimitReader(&repeated{}, bulk) }

// repeated is chunk without end.
type repeated struct{ at int }

func (r *repeated) Read(b []byte) (int, error) {
	n := copy(b, chunk()[r.at:])
	r.at = (r.at + n) % len(chunk())
	return n, nil
}

// sum describes all of a body.
func sum(r io.Reader) (string, error) {
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	n, err := io.Copy(h, r)
	return fmt.Sprintf("%d bytes, checksum %08x", n, h.Sum32()), err
}

var wantSum = sync.OnceValue(func() string {
	s, _ := sum(body()) // never fails
	return s
})

// load answers a GET with a large body, and a POST with the sum of its body.
func load(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		_, _ = io.Copy(w, body()) // the client misses the rest
		return
	}
	s, err := sum(r.Body)
	fmt.Fprint(w, s)
	if err != nil {
		fmt.Fprintf(w, ", %v", err)
	}
}

func download(client *http.Client) error {
	resp, err := client.Get("http://" + site + "/load")
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if got, err := sum(resp.Body); err != nil || got != wantSum() {
		return fmt.Errorf("got %s, %w; want %s", got, err, wantSum())
	}
	return nil
}

func upload(client *http.Client) error {
	resp, err := client.Post("http://"+site+"/load", "application/octet-stream", body())
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if got, err := io.ReadAll(resp.Body); err != nil || string(got) != wantSum() {
		return fmt.Errorf("the server got %s, %w; want %s", got, err, wantSum())
	}
	return nil
}
