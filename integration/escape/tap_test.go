package escape

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/testbed"
)

// etherMarker is the EtherType of the frames that tell the tap how far it has come. The rules let it pass.
const etherMarker = unix.ETH_P_LLDP

// tap sees every frame on the node's side of a pod's link, and compares those that the pod sends with the model.
type tap struct {
	fd   int
	ring []byte

	mu       sync.Mutex // guards the fields below
	model    model
	breach   []string // frames that must not leave, described
	left     map[string]int
	expected map[string]int // frames that a test waits for
	markers  atomic.Uint64  // the last marker that came by
}

// Sizes of the ring. The headers of a frame suffice.
const (
	tapBlock  = 1 << 20
	tapBlocks = 32
	tapFrame  = 2048
)

// startTap opens a tap at the interface with this index of the node.
func startTap(t *testing.T, node *testbed.Host, index int, first settings) *tap {
	t.Helper()
	tp := &tap{
		fd:    -1,
		model: model{settings: []settings{first}},
		left:  map[string]int{},
	}
	tp.forget()
	err := node.Do(func() (err error) {
		tp.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatalf("opening the tap: %v", err)
	}
	ring := unix.TpacketReq{
		Block_size: tapBlock, Block_nr: tapBlocks, Frame_size: tapFrame, Frame_nr: tapBlocks * tapBlock / tapFrame,
	}
	tp.ring, err = tp.open(index, &ring)
	if err != nil {
		t.Fatalf("opening the tap: %v", err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go tp.read(stop, stopped)
	t.Cleanup(func() {
		close(stop)
		<-stopped
		if err := errors.Join(unix.Munmap(tp.ring), unix.Close(tp.fd)); err != nil {
			t.Errorf("closing the tap: %v", err)
		}
	})
	return tp
}

func (tp *tap) open(index int, ring *unix.TpacketReq) ([]byte, error) {
	if err := unix.SetsockoptInt(tp.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
		return nil, fmt.Errorf("PACKET_VERSION: %w", err)
	}
	if err := unix.SetsockoptTpacketReq(tp.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, ring); err != nil {
		return nil, fmt.Errorf("PACKET_RX_RING: %w", err)
	}
	all := unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: index}
	if err := unix.Bind(tp.fd, &all); err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	return unix.Mmap(tp.fd, 0, tapBlock*tapBlocks, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func (tp *tap) read(stop <-chan struct{}, stopped chan<- struct{}) {
	defer close(stopped)
	for at := 0; ; at = (at + tapFrame) % len(tp.ring) {
		header := (*unix.Tpacket2Hdr)(unsafe.Pointer(&tp.ring[at]))
		for atomic.LoadUint32(&header.Status)&unix.TP_STATUS_USER == 0 {
			select {
			case <-stop:
				return
			default:
			}
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(tp.fd), Events: unix.POLLIN}}, 50) // looks again in any case
		}
		tp.see(header, tp.ring[at:at+tapFrame])
		atomic.StoreUint32(&header.Status, unix.TP_STATUS_KERNEL)
	}
}

func (tp *tap) see(header *unix.Tpacket2Hdr, slot []byte) {
	// The address of the sender comes after the header, aligned to 16 bytes.
	address := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&slot[(unix.SizeofTpacket2Hdr+15)&^15]))
	frame := slot[header.Mac : uint32(header.Mac)+header.Snaplen]
	if header.Status&unix.TP_STATUS_VLAN_VALID != 0 { // the kernel has taken the tag off
		tag := binary.BigEndian.AppendUint16(nil, header.Vlan_tpid)
		tag = binary.BigEndian.AppendUint16(tag, header.Vlan_tci)
		frame = append(append(append([]byte{}, frame[:12]...), tag...), frame[12:]...)
	}
	tp.mu.Lock()
	defer tp.mu.Unlock()
	if address.Pkttype == unix.PACKET_OUTGOING { // to the pod
		tp.model.arrive(parse(frame))
		return
	}
	if n, ok := tp.expected[string(frame)]; ok {
		tp.expected[string(frame)] = n + 1
	}
	if len(frame) >= 22 && binary.BigEndian.Uint16(frame[12:]) == etherMarker {
		tp.markers.Store(binary.BigEndian.Uint64(frame[14:]))
		return
	}
	p := parse(frame)
	tp.left[p.kind()]++
	if tp.model.mayLeave(p) {
		return
	}
	if len(tp.breach) < 10 {
		found := fmt.Sprintf("%s %s to %s left the pod\n%s", p.kind(), p.src, p.dst, hex.Dump(frame))
		tp.breach = append(tp.breach, found)
	}
}

func (p packet) kind() string {
	kind := map[byte]string{unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP"}[p.proto]
	if kind == "" {
		return "other"
	}
	if p.later {
		kind += " fragment"
	}
	return kind
}

// change makes the settings those that the rules may have from now on.
func (tp *tap) change(s ...settings) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.model.settings = s
}

// forget makes the tap forget all connections: the answers to frames that must not have left make later ones legal.
func (tp *tap) forget() {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.model.forget()
}

// breaches returns the frames that must not have left, and forgets them.
func (tp *tap) breaches() []string {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	found := tp.breach
	tp.breach = nil
	return found
}

// lost returns the number of frames that the tap had no room for since the last call.
func (tp *tap) lost() (uint32, error) {
	stats, err := unix.GetsockoptTpacketStats(tp.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0, fmt.Errorf("PACKET_STATISTICS: %w", err)
	}
	return stats.Drops, nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// settle sends a marker by w, a packet socket, and waits until the tap has seen it. It returns false if the tap does
// not.
func (tp *tap) settle(w way, macs [][]byte, number uint64, timeout time.Duration) bool {
	marker := append(append([]byte{}, macs[0]...), macs[1]...)
	marker = binary.BigEndian.AppendUint16(marker, etherMarker)
	marker = binary.BigEndian.AppendUint64(marker, number)
	w.mark(0)
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		w.send(marker, etherMarker) // the queue may be full
		if tp.markers.Load() == number {
			return true
		}
	}
	return false
}

// seen returns how often the pod has sent exactly this frame, once the caller has asked for it.
func (tp *tap) seen(frame []byte) int {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	if tp.expected == nil {
		tp.expected = map[string]int{}
	}
	n := tp.expected[string(frame)]
	tp.expected[string(frame)] = n
	return n
}
