package agent

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluice-cni/sluice/daemon/handover"
	"github.com/sluice-cni/sluice/integration/testbed"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestAttachWhileTheAgentEndsLeavesNoGate: the end waits for an ADD that is in progress, and closes its gate. A gate
// that was opened after the end would answer SYNs, and no daemon would accept their connections.
func TestAttachWhileTheAgentEndsLeavesNoGate(t *testing.T) {
	// Not parallel: a process that another test forks holds the closed sockets until it has executed its program.
	h := testbed.NewHost(t, "pod")
	asked, decide := make(chan struct{}), make(chan struct{})
	a := newAgent(t, func(at attach.Attachment, interfaces []string) (attach.Decision, error) {
		if at.IfName == "eth0" {
			close(asked)
			<-decide
		}
		return capture(at, interfaces)
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended, attached := make(chan error, 1), make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	go func() {
		_, err := a.Attach(t.Context(), attachment(h, "eth0"))
		attached <- err
	}()
	<-asked
	cancel()
	select {
	case err := <-ended:
		t.Errorf("Run has returned %v during an ADD", err)
		ended <- nil
	case <-time.After(100 * time.Millisecond): // long enough to see an end that does not wait
	}
	close(decide)
	if err := <-attached; err != nil {
		t.Errorf("Attach before the end: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if listening(t, h) {
		t.Error("Run has returned, but the capture port is open")
	}
	if _, err := a.Attach(t.Context(), attachment(h, "net1")); !errors.Is(err, handover.ErrOver) || listening(t, h) {
		t.Errorf("Attach after the end: got %v, listening %t; want %v and no gate",
			err, listening(t, h), handover.ErrOver)
	}
}
