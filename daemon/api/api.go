// Package api serves the agent socket: the plugin's calls, the status, and the hand-over to another daemon. It also
// has the metrics.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"

	"github.com/sluice-cni/sluice/daemon/agent"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/handover"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// API answers questions about the node, and passes the plugin's calls to the agent.
type API struct {
	Agent    *agent.Agent
	Table    *endpoint.Table
	Upstream agent.Upstream
	// Trust adds to the status of an attachment how far its containers trust the proxy's CA. It may be nil.
	Trust func(*attach.AttachmentStatus)
	// Runtime reports whether the container runtime asks the daemon about new containers, and whether it needs to: not
	// as long as there is no CA. It may be nil.
	Runtime func() (asks, needed bool)
	// Ready says why the daemon is not ready to serve. It may be nil.
	Ready func() error
	Log   *slog.Logger
}

// Serve answers on l until ctx ends.
func (a *API) Serve(ctx context.Context, l net.Listener) error {
	s := &http.Server{
		Handler:        a.handler(),
		ReadTimeout:    attach.Timeout,
		WriteTimeout:   2 * attach.Timeout,
		IdleTimeout:    attach.Timeout,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       slog.NewLogLogger(a.Log.Handler(), slog.LevelWarn),
	}
	// A plugin whose call is interrupted takes the daemon for down, which is right.
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the agent socket: %w", err)
	}
	return nil
}

func (a *API) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+attach.PathAttachments, a.attach)
	mux.HandleFunc("DELETE "+attach.PathAttachments+"/{containerID}/{ifName}", a.detach)
	mux.HandleFunc("GET "+attach.PathAttachments, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.attachments(), nil)
	})
	mux.HandleFunc("GET "+attach.PathSummary, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.Summary(), nil)
	})
	mux.HandleFunc("GET "+attach.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		s := a.Summary()
		s.Attachments = a.attachments()
		answer(w, s, nil)
	})
	mux.HandleFunc("POST "+handover.Path, a.handOver)
	return mux
}

func (a *API) attach(w http.ResponseWriter, r *http.Request) {
	var at attach.Attachment
	body := json.NewDecoder(http.MaxBytesReader(w, r.Body, attach.MaxRequest))
	body.DisallowUnknownFields()
	if err := body.Decode(&at); err != nil {
		message := fmt.Sprintf("the request is not an attachment: %v", err)
		answer(w, nil, &attach.RefusedError{Message: message, Final: true})
		return
	}
	d, err := a.Agent.Attach(r.Context(), at)
	answer(w, d, err)
}

func (a *API) detach(w http.ResponseWriter, r *http.Request) {
	id := attach.ID{ContainerID: r.PathValue("containerID"), IfName: r.PathValue("ifName")}
	if err := id.Validate(); err != nil {
		answer(w, nil, &attach.RefusedError{Message: err.Error(), Final: true})
		return
	}
	answer(w, struct{}{}, a.Agent.Detach(id))
}

// attachments describes every attachment as it is now.
func (a *API) attachments() []attach.AttachmentStatus {
	a.Agent.Count()
	all := a.Table.Status()
	for i := range all {
		if a.Trust != nil {
			a.Trust(&all[i])
		}
	}
	return all
}

// Summary is the status without the attachments, which take time to describe.
func (a *API) Summary() attach.Status {
	s := attach.Status{Upstream: a.Upstream.Status()}
	if a.Ready != nil {
		if err := a.Ready(); err != nil {
			s.NotReady = err.Error()
		}
	}
	return s
}

// handOver upgrades the connection to the hand-over protocol.
func (a *API) handOver(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != handover.Protocol {
		answer(w, nil, &attach.RefusedError{Message: "this sluiced hands over by " + handover.Protocol, Final: true})
		return
	}
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		answer(w, nil, err)
		return
	}
	defer c.Close() //nolint:errcheck // everything was sent
	_, err = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n"+
		"Connection: Upgrade\r\nUpgrade: "+handover.Protocol+"\r\n\r\n")
	if err != nil {
		return // the other daemon has gone
	}
	_ = a.Agent.HandOver(c.(*net.UnixConn)) // the agent has logged it
}

// answer writes v, or the error.
func answer(w http.ResponseWriter, v any, err error) {
	if errors.Is(err, handover.ErrOver) {
		panic(http.ErrAbortHandler) // the plugin then treats this daemon as down
	}
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		refused := &attach.RefusedError{Message: err.Error()}
		errors.As(err, &refused)
		code := http.StatusServiceUnavailable
		if refused.Final {
			code = http.StatusUnprocessableEntity
		}
		w.WriteHeader(code)
		v = refused
	}
	_ = json.NewEncoder(w).Encode(v) // a caller that hung up asks again
}
