package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"

	"github.com/sluice-cni/sluice/daemon/unixsock"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// Listen binds the agent socket, in place of one that another daemon left or has handed over. From then on the
// plugin's calls queue until Serve. Call it before Run.
func (a *Agent) Listen(path string) (net.Listener, error) {
	l, err := unixsock.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	a.socket = l
	return l, nil
}

// Serve answers on l until ctx ends.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	s := &http.Server{
		Handler:        a.handler(),
		ReadTimeout:    attach.Timeout,
		WriteTimeout:   2 * attach.Timeout,
		IdleTimeout:    attach.Timeout,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() }) // what it interrupts, the plugin takes for a daemon that is down
	defer stop()
	if err := s.Serve(unixsock.RootOnly{Listener: l, Log: a.log}); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the agent socket: %w", err)
	}
	return nil
}

func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathHandover, a.serveHandover)
	mux.HandleFunc("POST "+attach.PathAttachments, func(w http.ResponseWriter, r *http.Request) {
		var at attach.Attachment
		dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, attach.MaxRequest))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&at); err != nil {
			answer(w, nil, &attach.RefusedError{Message: fmt.Sprintf("the request is not an attachment: %v", err), Final: true})
			return
		}
		d, err := a.Attach(r.Context(), at)
		answer(w, d, err)
	})
	mux.HandleFunc("DELETE "+attach.PathAttachments+"/{containerID}/{ifName}", func(w http.ResponseWriter, r *http.Request) {
		id := attach.ID{ContainerID: r.PathValue("containerID"), IfName: r.PathValue("ifName")}
		if err := id.Validate(); err != nil {
			answer(w, nil, &attach.RefusedError{Message: err.Error(), Final: true})
			return
		}
		answer(w, struct{}{}, a.Detach(id))
	})
	mux.HandleFunc("GET "+attach.PathAttachments, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.Status().Attachments, nil)
	})
	mux.HandleFunc("GET "+attach.PathSummary, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.Summary(), nil)
	})
	mux.HandleFunc("GET "+attach.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, a.Status(), nil)
	})
	return mux
}

func answer(w http.ResponseWriter, v any, err error) {
	if errors.Is(err, errRetired) {
		panic(http.ErrAbortHandler) // to the plugin, this daemon is down
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
	_ = json.NewEncoder(w).Encode(v) // a peer that hung up will ask again
}
