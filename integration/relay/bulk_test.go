package relay

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/sluice-cni/sluice/integration/testbed"
)

const (
	bulkSize     = 64 << 20
	downloadPort = "9001"
	uploadPort   = "9002"
)

// TestBulkDataStaysInTheKernel: the daemon moves it by splice(2). The kernel accounts for the bytes that a process
// reads and writes, and not for those that it splices.
func TestBulkDataStaysInTheKernel(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"connect", "socks5"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			n := testbed.NewWith(t, protocol)
			// The client misses bytes that are lost.
			n.World.Serve(":"+downloadPort, func(c net.Conn) {
				sum, _ := sendBulk(c)
				_, _ = c.Write(sum)
			})
			n.World.Serve(":"+uploadPort, func(c net.Conn) {
				sum := sha256.New()
				_, _ = io.CopyN(sum, c, bulkSize)
				_, _ = c.Write(sum.Sum(nil))
			})
			testbed.StartAnsweringProxy(n, protocol, "").Mend()
			d := n.StartDaemon()
			pod := n.AddPod("big")
			for _, ip := range []string{testbed.WorldIPv4, testbed.WorldIPv6} {
				before := copiedBy(t, d.Pid())
				download(t, pod.Host, net.JoinHostPort(ip, downloadPort))
				upload(t, pod.Host, net.JoinHostPort(ip, uploadPort))
				if copied := copiedBy(t, d.Pid()) - before; copied > bulkSize/64 {
					t.Errorf("over %s the daemon read and wrote %d bytes itself to relay %d", ip, copied, 2*bulkSize)
				}
			}
			if got := n.SYNs(); got != 0 { // or there would be nothing to relay
				t.Errorf("%d SYNs left the pod, want none", got)
			}
		})
	}
}

// sendBulk sends bulkSize bytes and returns their checksum.
func sendBulk(c net.Conn) ([]byte, error) {
	sum, block := sha256.New(), testbed.RandomBytes(1<<20)
	for range bulkSize / len(block) {
		sum.Write(block)
		if _, err := c.Write(block); err != nil {
			return nil, err
		}
		block[0]++
	}
	return sum.Sum(nil), nil
}

// download reads bulkSize bytes and then their checksum.
func download(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	c := testbed.MustOpen(t, h, address)
	sum := sha256.New()
	if n, err := io.CopyN(sum, c, bulkSize); err != nil {
		t.Fatalf("after %d bytes from %s: %v", n, address, err)
	}
	receive(t, c, sum.Sum(nil))
	wantEnd(t, c)
	_ = c.Close() // read to its end
}

// upload sends bulkSize bytes and reads back their checksum.
func upload(t *testing.T, h *testbed.Host, address string) {
	t.Helper()
	c := testbed.MustOpen(t, h, address)
	sum, err := sendBulk(c)
	if err != nil {
		t.Fatalf("sending to %s: %v", address, err)
	}
	receive(t, c, sum)
	wantEnd(t, c)
	_ = c.Close() // read to its end
}

// copiedBy is how many bytes a process has moved in and out of its memory by read(2), write(2) and their like.
func copiedBy(t *testing.T, pid int) uint64 {
	t.Helper()
	account, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		t.Fatal(err)
	}
	var in, out uint64
	if _, err := fmt.Fscanf(bytes.NewReader(account), "rchar: %d\nwchar: %d\n", &in, &out); err != nil {
		t.Fatalf("%s: %v", account, err)
	}
	return in + out
}
