package attach

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// Paths, limits and HTTP routes that the plugin, `sluiced status` and the daemon agree on.
const (
	DefaultSocket   = "/run/sluice/agent.sock"
	DefaultStateDir = "/run/sluice"
	DefaultDataDir  = "/var/lib/sluice"

	PathAttachments = "/v1/attachments" // POST attach, GET list, DELETE …/{containerID}/{ifName} detach
	PathStatus      = "/v1/status"      // GET
	PathSummary     = "/v1/summary"     // GET, the status without the attachments
	PathAlive       = "/v1/alive"       // GET, an error if the daemon hangs

	// MaxRequest bounds a request's body, in bytes.
	MaxRequest = 64 << 10
	// Timeout bounds one call. A daemon that takes longer counts as down.
	Timeout = 5 * time.Second
)

// ErrDaemonDown means that a call got no valid answer. The daemon may have acted on it, or may do so later.
var ErrDaemonDown = errors.New("sluiced does not answer")

// RefusedError is the daemon's answer that it will not, or cannot, act on a request.
type RefusedError struct {
	Message string `json:"error"`
	// Final means that the request itself is wrong: the same request will never succeed.
	Final bool `json:"final"`
}

// Error returns the daemon's message.
func (e *RefusedError) Error() string { return e.Message }

// Client calls the daemon over the agent socket. It speaks HTTP/1.0, for which a screen of code is enough: net/http and
// the TLS that it links would make up a third of the plugin, which is read and started for every pod of the node.
type Client struct{ socket string }

// NewClient makes a client of the daemon behind the unix socket at this path. It connects for each call.
func NewClient(socket string) *Client { return &Client{socket} }

// Attach asks the daemon for its decision about a. If that is to capture the pod, the pod's listeners are open when
// Attach returns. The error is a *RefusedError or wraps ErrDaemonDown.
func (c *Client) Attach(ctx context.Context, a Attachment) (Decision, error) {
	var d Decision
	err := c.call(ctx, "POST", PathAttachments, a, &d)
	if err == nil && (d.Reason == "" || d.Capture && d.Ruleset == nil) {
		// It must not be read as the decision not to capture.
		err = fmt.Errorf("%w: its answer is not a decision", ErrDaemonDown)
	}
	return d, err
}

// Detach tells the daemon that the attachment is gone: it closes the attachment's listeners. An ID that it does not
// know is no error.
func (c *Client) Detach(ctx context.Context, id ID) error {
	path := PathAttachments + "/" + url.PathEscape(id.ContainerID) + "/" + url.PathEscape(id.IfName)
	return c.call(ctx, "DELETE", path, nil, nil)
}

// List returns the status of each attachment.
func (c *Client) List(ctx context.Context) ([]AttachmentStatus, error) {
	var l []AttachmentStatus
	err := c.call(ctx, "GET", PathAttachments, nil, &l)
	return l, err
}

// Status returns the status of the daemon, of the upstream and of each attachment.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, "GET", PathStatus, nil, &s)
	return s, err
}

// Summary is Status without the attachments. It is cheaper, as the daemon needs not look into each netns.
func (c *Client) Summary(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, "GET", PathSummary, nil, &s)
	return s, err
}

// Alive returns an error if the daemon hangs, or does not answer.
func (c *Client) Alive(ctx context.Context) error {
	return c.call(ctx, "GET", PathAlive, nil, nil)
}

// call sends a request with in as its body, and reads the answer into out. Either may be nil.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.socket)
	if err != nil {
		return c.down(err)
	}
	defer conn.Close() //nolint:errcheck // everything was read
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	request := fmt.Appendf(nil, "%s %s HTTP/1.0\r\nHost: sluiced\r\nContent-Length: %d\r\n\r\n",
		method, path, len(body))
	_, err = conn.Write(append(request, body...))
	if err == nil {
		err = readAnswer(bufio.NewReader(conn), out)
	}
	var refused *RefusedError
	switch {
	case err == nil || errors.As(err, &refused):
		return err
	case ctx.Err() != nil:
		return c.down(ctx.Err())
	}
	return c.down(err) // the answer is cut off, or not the daemon's
}

// readAnswer reads the answer to a request into out, unless out is nil. The error is a *RefusedError if the daemon
// refuses the request.
func readAnswer(r *bufio.Reader, out any) error {
	status, err := r.ReadString('\n')
	if err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	for line := status; strings.TrimSpace(line) != ""; {
		if line, err = r.ReadString('\n'); err != nil {
			return fmt.Errorf("reading the answer: %w", err)
		}
	}
	version, code, _ := strings.Cut(strings.TrimSpace(status), " ")
	switch {
	case !strings.HasPrefix(version, "HTTP/1."):
		return fmt.Errorf("the answer is %q", strings.TrimSpace(status))
	case !strings.HasPrefix(code, "200 "):
		refused := &RefusedError{}
		if err := json.NewDecoder(r).Decode(refused); err != nil || refused.Message == "" {
			return fmt.Errorf("it answered %s", code) // not the daemon's way to refuse
		}
		return refused
	case out == nil:
		return nil
	}
	if err := json.NewDecoder(r).Decode(out); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return nil
}

// down adds ErrDaemonDown and the socket's path to err.
func (c *Client) down(err error) error {
	return fmt.Errorf("%w at %s: %w", ErrDaemonDown, c.socket, err)
}
