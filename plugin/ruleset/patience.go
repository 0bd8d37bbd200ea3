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

// What the SYN gate drops is sent again by the kernel of whoever connects, after a second at first and then after twice as
// long each time, six times in all. These sysctls of the pod's netns (Documentation/networking/ip-sysctl.rst) have it sent
// every second for two minutes, and then go on for hours.
var synPatience = []sysctl{
	{"tcp_syn_retries", atLeast, 127},         // the most
	{"tcp_syn_linear_timeouts", atLeast, 127}, // as many more; since Linux 6.5
}

// With these no SYN comes later than 5 s after the last, and nobody who has waited for long waits on for long. The kernel
// gives up after the time that 127 of them would take if each came twice as long after the last until it is 5 s, which is
// 632 s (tcp_model_timeout in net/ipv4/tcp_timer.c). They are about all TCP of the pod: data is sent again as often, so that
// tcp_retries2 has to be more for it to take 15 minutes to give up, as ever.
var quickPatience = []sysctl{
	{"tcp_rto_max_ms", atMost, 5000}, // since Linux 6.15
	{"tcp_retries2", atLeast, 188},
}

type sysctl struct {
	name  string
	limit func(is, want int) bool
	want  int
}

func atLeast(is, want int) bool { return is >= want }
func atMost(is, want int) bool  { return is <= want }

// Patience makes the pod in the netns at path wait for a daemon that is late for longer than TCP does by itself, and come
// back soon. captured is for a pod that opted in, not for one of which that is not known: only there may it concern more
// than what waits.
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

// sysctlPath is that of the netns of the thread that opens it.
func sysctlPath(name string) string { return "/proc/sys/net/ipv4/" + name }

func (s sysctl) set() error {
	text, err := os.ReadFile(sysctlPath(s.name))
	if err != nil {
		return err
	}
	if is, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && s.limit(is, s.want) {
		return nil
	}
	return os.WriteFile(sysctlPath(s.name), []byte(strconv.Itoa(s.want)), 0) // it is there
}
