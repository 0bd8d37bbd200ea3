package ruleset

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// synPatience makes a connection wait for hours. The kernel retransmits a SYN that the SYN gate has dropped: after one
// second at first and then after twice as long each time, six times in all. With these sysctls of the pod's netns
// (Documentation/networking/ip-sysctl.rst) it does so every second for two minutes, and then goes on for hours.
var synPatience = []sysctl{
	{"ipv4/tcp_syn_retries", atLeast, 127}, // the maximum
	// SYNs before the intervals double, not counted above; since Linux 6.5.
	{"ipv4/tcp_syn_linear_timeouts", atLeast, 127},
}

// quickPatience ends a long wait soon after the daemon is back: no SYN comes later than 5 s after the one before. The
// kernel then gives up after the time that 127 SYNs take if the interval doubles until it is 5 s, which is 632 s
// (tcp_model_timeout in net/ipv4/tcp_timer.c). These sysctls apply to all TCP of the pod: data is retransmitted every
// 5 s at the latest too, so tcp_retries2 has to be higher for TCP to give up after 15 minutes, as it does by default.
//
// An app may close a waiting connection with more data than the receive window holds. The kernel then probes the
// window, and resets the connection once the interval has grown to its maximum: after 13 s instead of three minutes.
// With tcp_orphan_retries above tcp_retries2, which bounds the growth (tcp_probe_timer and tcp_send_probe0), it goes on
// as long as the probes are answered. Unanswered data of a closed socket is retransmitted for 21 minutes.
var quickPatience = []sysctl{
	{"ipv4/tcp_rto_max_ms", atMost, 5000}, // since Linux 6.15
	{"ipv4/tcp_retries2", atLeast, 188},
	{orphanRetries, atLeast, maxOrphanRetries},
}

const orphanRetries, maxOrphanRetries = "ipv4/tcp_orphan_retries", 255

// entryPatience keeps the conntrack entry of a connection whose client has half-closed or closed it. Without the entry
// the original destination is unknown, and an answer or a reset does not find the client. The entry of a connection
// that waits, or whose answer comes late, is in one of these states (net/netfilter/nf_conntrack_proto_tcp.c):
//
//   - CLOSE_WAIT, by default for 60 s: one side has ended, and the other side has acknowledged that.
//   - FIN_WAIT, for 120 s: not acknowledged yet. If the last segment of the handshake meets a full accept queue, the
//     client goes on retransmitting, by default every 120 s in the end.
//   - LAST_ACK, for 30 s: both sides have ended, or the first FIN was retransmitted, which conntrack cannot tell apart.
//
// The sysctls get the timeout of an established connection, which is five days, since these entries belong to one. An
// entry stays no longer than before when a reset (CLOSE, 10 s) or the end of both sides (TIME_WAIT, 120 s) ends it: no
// byte can follow, so these two timeouts stay. While a FIN or data is not acknowledged, an entry lasts 300 s at most
// (nf_conntrack_tcp_timeout_unacknowledged). So the cost is an entry for a peer that has vanished after its FIN was
// acknowledged. In a table that is nearly full, the kernel drops entries in these states first (gc_worker in
// net/netfilter/nf_conntrack_core.c).
//
// A provisional pod gets them too. Once it is known to be captured, its connections wait as any others do, and a daemon
// in a container cannot write to /proc/sys. If it turns out not to be captured, its netns has no use of conntrack.
//
// SO_KEEPALIVE on the listeners would not do: the kernel forgets the socket of a closed app after 60 s, and then a
// probe is answered with a reset.
var entryPatience = []sysctl{
	{"netfilter/nf_conntrack_tcp_timeout_close_wait", atLeast, establishedTimeout},
	{"netfilter/nf_conntrack_tcp_timeout_fin_wait", atLeast, establishedTimeout},
	{"netfilter/nf_conntrack_tcp_timeout_last_ack", atLeast, establishedTimeout},
}

// closedPatience keeps the kernel from resetting a connection that the app has closed. If the FIN is acknowledged while
// close is still at work, the kernel keeps the socket for tcp_fin_timeout, and by default resets the connection then,
// with the data that waits. It does not if tcp_fin_timeout is longer than TIME_WAIT, which is 60 s
// (tcp_rcv_state_process in net/ipv4/tcp_input.c and tcp_keepalive_timer in tcp_timer.c). A provisional pod gets this
// one too, for the same reason as above: an app does not notice it.
var closedPatience = []sysctl{{"ipv4/tcp_fin_timeout", atLeast, 120}}

// establishedTimeout is the default of nf_conntrack_tcp_timeout_established, in seconds.
const establishedTimeout = 5 * 24 * 60 * 60

type sysctl struct {
	path  string                       // below /proc/sys/net
	holds func(current, want int) bool // current needs no change
	want  int
}

func atLeast(current, want int) bool { return current >= want }
func atMost(current, want int) bool  { return current <= want }

// Patience sets sysctls in the netns at path, so that the pod's connections wait longer for a late daemon or upstream
// than they do by default, and soon try again. Some exist only once the rules have brought conntrack into the netns, so
// Apply comes first. captured is false for a pod that is not known to have opted in: Patience then leaves out the
// sysctls of retransmission, which concern all its TCP. Sysctls that the kernel lacks are skipped.
func Patience(netns string, captured bool) error {
	return within(netns, func() error {
		all := everyPatience()
		if _, err := os.Stat(quickPatience[0].file()); err == nil && captured {
			all = slices.Concat(all, quickPatience)
		}
		var errs []error
		for _, s := range all {
			if err := s.set(); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("setting sysctl net/%s: %w", s.path, err))
			}
		}
		return errors.Join(errs...)
	})
}

// EndPatience undoes that in the netns at path as far as it would keep the netns of a deleted pod. When the interface
// has gone, the FIN of a proxy that accepted there reaches no socket any more. The kernel would repeat it 255 times, up
// to two minutes apart, and keep the netns for that time (seen: LAST_ACK with the timer persist).
func EndPatience(netns string) error {
	return within(netns, func() error {
		ours := func(current, _ int) bool { return current != maxOrphanRetries }
		err := sysctl{orphanRetries, ours, 0}.set() // the kernel's default
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("setting sysctl net/%s: %w", orphanRetries, err)
		}
		return nil
	})
}

// everyPatience has the sysctls that every captured pod gets, provisional or not.
func everyPatience() []sysctl { return slices.Concat(synPatience, entryPatience, closedPatience) }

// CheckPatience names each of the sysctls in the netns at path that a provisional pod gets too and that is not as
// Patience sets it. A daemon in a container cannot set the others.
func CheckPatience(netns string) (drift []string, err error) {
	err = within(netns, func() error {
		for _, s := range everyPatience() {
			current, err := s.get()
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("reading sysctl net/%s: %w", s.path, err)
			}
			if !s.holds(current, s.want) {
				drift = append(drift, fmt.Sprintf("sysctl net/%s is %d, and was set to %d", s.path, current, s.want))
			}
		}
		return nil
	})
	return drift, err
}

// file leads to the sysctl of the netns of the thread that opens it.
func (s sysctl) file() string { return "/proc/sys/net/" + s.path }

func (s sysctl) get() (int, error) {
	text, err := os.ReadFile(s.file())
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

func (s sysctl) set() error {
	if current, err := s.get(); err != nil || s.holds(current, s.want) {
		return err
	}
	return os.WriteFile(s.file(), []byte(strconv.Itoa(s.want)), 0) // no mode: the file exists
}
