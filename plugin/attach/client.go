package attach

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
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

// Client calls the daemon over the agent socket.
type Client struct {
	http   http.Client
	socket string
}

// NewClient makes a client of the daemon behind the unix socket at this path. It connects at the first call.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{
		http:   http.Client{Timeout: Timeout, Transport: &http.Transport{DialContext: dial}},
		socket: socket,
	}
}

// Attach asks the daemon for its decision about a. If that is to capture the pod, the pod's listeners are open when
// Attach returns. The error is a *RefusedError or wraps ErrDaemonDown.
func (c *Client) Attach(ctx context.Context, a Attachment) (Decision, error) {
	var d Decision
	err := c.call(ctx, http.MethodPost, PathAttachments, a, &d)
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
	return c.call(ctx, http.MethodDelete, path, nil, nil)
}

// List returns the status of each attachment.
func (c *Client) List(ctx context.Context) ([]AttachmentStatus, error) {
	var l []AttachmentStatus
	err := c.call(ctx, http.MethodGet, PathAttachments, nil, &l)
	return l, err
}

// Status returns the status of the daemon, of the upstream and of each attachment.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, http.MethodGet, PathStatus, nil, &s)
	return s, err
}

// Summary is Status without the attachments. It is cheaper, as the daemon needs not look into each netns.
func (c *Client) Summary(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, http.MethodGet, PathSummary, nil, &s)
	return s, err
}

// Alive returns an error if the daemon hangs, or does not answer.
func (c *Client) Alive(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, PathAlive, nil, nil)
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://sluiced"+path, body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.down(err)
	}
	defer resp.Body.Close() //nolint:errcheck // the body is read, or not needed
	if resp.StatusCode != http.StatusOK {
		refused := &RefusedError{}
		if err := json.NewDecoder(resp.Body).Decode(refused); err != nil || refused.Message == "" {
			return c.down(fmt.Errorf("it answered %s", resp.Status)) // not the daemon's way to refuse
		}
		return refused
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return c.down(err) // the answer is cut off, or not the daemon's
	}
	return nil
}

// down adds ErrDaemonDown and the socket's path to err.
func (c *Client) down(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // leaves out the URL: its host is made up
	}
	return fmt.Errorf("%w at %s: %w", ErrDaemonDown, c.socket, err)
}
