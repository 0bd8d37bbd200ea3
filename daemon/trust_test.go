package main

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/sluice-cni/sluice/daemon/captured"
	"github.com/sluice-cni/sluice/daemon/endpoint"
	"github.com/sluice-cni/sluice/daemon/gate"
	"github.com/sluice-cni/sluice/daemon/nested"
	"github.com/sluice-cni/sluice/daemon/trust"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestNestedTold: proxies are told of the states of nested containers where these are given the CA. Where the pod
// declines it, the policy alone counts.
func TestNestedTold(t *testing.T) {
	t.Parallel()
	p := &podTrust{nested: nested.New(nested.Config{}), Trust: newTrust(t)}
	for _, c := range []struct {
		trust attach.Trust
		want  string
	}{
		{attach.Trust{CA: true, TLS: attach.Inspect, Nested: attach.Inspect}, "unknown"},
		{attach.Trust{CA: true, TLS: attach.Inspect, Nested: attach.Pass}, ""},
		{attach.Trust{TLS: attach.Inspect, Nested: attach.Inspect}, ""},
	} {
		r := attach.Record{State: attach.Captured, Trust: c.trust}
		r.Pod.UID = "pod"
		told := p.ofRecord(r)
		if got := told.Container(netip.MustParseAddr("172.17.0.2")); got != c.want {
			t.Errorf("%+v: got the state %q, want %q", c.trust, got, c.want)
		}
		if told.Nested != c.trust.Nested {
			t.Errorf("%+v: got the policy %s, want %s", c.trust, told.Nested, c.trust.Nested)
		}
	}
}

// newTrust makes a trust.Trust whose runtime is not there.
func newTrust(t *testing.T) *trust.Trust {
	t.Helper()
	dir := t.TempDir()
	known, err := trust.New(trust.Config{
		Socket: filepath.Join(dir, "nri.sock"), CAFile: filepath.Join(dir, "ca.crt"),
		Dir: filepath.Join(dir, "trust"), Hook: "/opt/cni/bin/sluice", Plugin: filepath.Join(dir, "sluice"),
		Wanted: func(string) bool { return true }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return known
}

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
	known := newTrust(t)
	serves := make(chan struct{})
	p := &podTrust{
		Trust: known, table: endpoint.NewTable(nil, captured.Policy{}, slog.New(slog.DiscardHandler)),
		nested: nested.New(nested.Config{}),
	}
	a := trusting{telling{serves: serves}, attach.Pod{UID: "pod"}, p}
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
