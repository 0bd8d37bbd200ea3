package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// telling is an acceptor that tells when it serves.
type telling struct {
	endpoint.Acceptor
	serves chan struct{}
}

// Serve implements endpoint.Acceptor.
func (a telling) Serve(context.Context, context.Context, *gate.Gate) { close(a.serves) }

// TestConnectionsWaitForTheCA: no connection of a pod is accepted until its containers have been looked at.
func TestConnectionsWaitForTheCA(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	known, err := trust.New(trust.Config{
		Socket: filepath.Join(dir, "nri.sock"), CAFile: filepath.Join(dir, "ca.crt"),
		Dir: filepath.Join(dir, "trust"), Hook: "/opt/cni/bin/sluice", Plugin: filepath.Join(dir, "sluice"),
		Wanted: func(string) bool { return true }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	serves := make(chan struct{})
	a := trusting{telling{serves: serves}, attach.Pod{UID: "pod"}, &podTrust{Trust: known}}
	ended, end := context.WithCancel(t.Context())
	end()
	a.Serve(t.Context(), ended, nil) // the pod goes before anything is known
	select {
	case <-serves:
		t.Error("connections were accepted before the runtime was asked")
	default:
	}
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error)
	go func() { stopped <- known.Run(ctx) }() // there is no runtime, which is known at once
	a.Serve(t.Context(), t.Context(), nil)
	<-serves
	stop()
	if err := <-stopped; err != nil {
		t.Errorf("Run: %v", err)
	}
}
