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

// What plugin, `sluiced status` and daemon agree on, beside the types.
const (
	DefaultSocket   = "/run/sluice/agent.sock"
	DefaultStateDir = "/run/sluice"

	PathAttachments = "/v1/attachments" // POST attach, GET list, DELETE …/{containerID}/{ifName} detach
	PathStatus      = "/v1/status"      // GET
	PathSummary     = "/v1/summary"     // GET the status without the attachments

	// MaxRequest bounds a request's body, in bytes.
	MaxRequest = 64 << 10
	// Timeout bounds one call. A daemon that takes longer counts as down.
	Timeout = 5 * time.Second
)

// ErrDaemonDown means that nobody answered: whether the daemon will act on the call is not known.
var ErrDaemonDown = errors.New("sluiced does not answer")

// RefusedError is the daemon's answer that it will not, or cannot, do what was asked.
type RefusedError struct {
	Message string `json:"error"`
	// Final means that to ask again is of no use: what was asked is wrong.
	Final bool `json:"final"`
}

func (e *RefusedError) Error() string { return e.Message }

// Client calls the daemon over the agent socket.
type Client struct {
	http   http.Client
	socket string
}

// NewClient makes a client; it connects when it is used.
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

// Attach asks what is to be done with a. When the decision is to capture, its listeners are open.
func (c *Client) Attach(ctx context.Context, a Attachment) (Decision, error) {
	var d Decision
	err := c.call(ctx, http.MethodPost, PathAttachments, a, &d)
	if err == nil && (d.Reason == "" || d.Capture && d.Ruleset == nil) {
		err = fmt.Errorf("%w: what it says is no decision", ErrDaemonDown) // least of all not to capture
	}
	return d, err
}

// Detach makes the daemon forget id, if it knows it, and close what it holds for it.
func (c *Client) Detach(ctx context.Context, id ID) error {
	path := PathAttachments + "/" + url.PathEscape(id.ContainerID) + "/" + url.PathEscape(id.IfName)
	return c.call(ctx, http.MethodDelete, path, nil, nil)
}

// List returns what the daemon knows of each attachment.
func (c *Client) List(ctx context.Context) ([]AttachmentStatus, error) {
	var l []AttachmentStatus
	err := c.call(ctx, http.MethodGet, PathAttachments, nil, &l)
	return l, err
}

// Status returns what the daemon knows of itself, the upstream and each attachment.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, http.MethodGet, PathStatus, nil, &s)
	return s, err
}

// Summary is Status without the attachments, to look into which takes the daemon some time.
func (c *Client) Summary(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, http.MethodGet, PathSummary, nil, &s)
	return s, err
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
	defer resp.Body.Close() //nolint:errcheck // read to its end or of no more use
	if resp.StatusCode != http.StatusOK {
		refused := &RefusedError{}
		if err := json.NewDecoder(resp.Body).Decode(refused); err != nil || refused.Message == "" {
			return c.down(fmt.Errorf("it answered %s", resp.Status))
		}
		return refused
	}
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return c.down(err) // cut off half-way
	}
	return nil
}

func (c *Client) down(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // its URL is made up
	}
	return fmt.Errorf("%w at %s: %w", ErrDaemonDown, c.socket, err)
}
