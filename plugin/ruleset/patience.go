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
	{"tcp_syn_retries", atLeast, 127},         // the maximum
	{"tcp_syn_linear_timeouts", atLeast, 127}, // SYNs before the intervals double, not counted above; since Linux 6.5
}

// quickPatience ends a long wait soon after the daemon is back: no SYN comes later than 5 s after the one before. The
// kernel then gives up after the time that 127 SYNs take if the interval doubles until it is 5 s, which is 632 s
// (tcp_model_timeout in net/ipv4/tcp_timer.c). These sysctls apply to all TCP of the pod: data is retransmitted every
// 5 s at the latest too, so tcp_retries2 has to be higher for TCP to give up after 15 minutes, as it does by default.
var quickPatience = []sysctl{
	{"tcp_rto_max_ms", atMost, 5000}, // since Linux 6.15
	{"tcp_retries2", atLeast, 188},
}

type sysctl struct {
	name  string
	holds func(current, want int) bool // current needs no change
	want  int
}

func atLeast(current, want int) bool { return current >= want }
func atMost(current, want int) bool  { return current <= want }

// Patience sets TCP sysctls in the netns at path, so that the pod's connections wait longer for a late daemon than they
// do by default, and soon try again. captured is false for a pod that is not known to have opted in: Patience then
// leaves out the sysctls that concern more than SYNs. Sysctls that the kernel lacks are skipped.
func Patience(netns string, captured bool) error {
	return within(netns, func() error {
		all := synPatience
		if _, err := os.Stat(sysctlPath(quickPatience[0].name)); err == nil && captured {
			all = slices.Concat(all, quickPatience)
		}
		var errs []error
		for _, s := range all {
			if err := s.set(); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("sysctl net.ipv4.%s: %w", s.name, err))
			}
		}
		return errors.Join(errs...)
	})
}

// sysctlPath leads to the sysctl of the netns of the thread that opens it.
func sysctlPath(name string) string { return "/proc/sys/net/ipv4/" + name }

func (s sysctl) set() error {
	text, err := os.ReadFile(sysctlPath(s.name))
	if err != nil {
		return err
	}
	if current, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && s.holds(current, s.want) {
		return nil
	}
	return os.WriteFile(sysctlPath(s.name), []byte(strconv.Itoa(s.want)), 0) // no mode: the file exists
}
