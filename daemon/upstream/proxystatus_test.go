package upstream

import (
	"errors"
	"testing"
)

func TestProxyStatusNamesTheSideThatFailed(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		values []string
		want   error
	}{
		{"none", nil, nil},
		{"without an error", []string{"squid; received-status=200"}, nil},
		{"refused", []string{"envoy; error=connection_refused"}, ErrUnreachable},
		{"refused, without a space", []string{`"my proxy";error=connection_refused;details="x"`}, ErrUnreachable},
		{"timed out", []string{"p; error=connection_timeout"}, ErrUnreachable},
		{"not allowed", []string{"p; error=http_request_denied"}, ErrUnreachable},
		{"overload", []string{"p; error=connection_limit_reached"}, ErrLate},
		{"a fault of the proxy", []string{"p; error=proxy_internal_error"}, ErrLate},
		{"a loop", []string{"p; error=proxy_loop_detected"}, ErrMisconfigured},
		{"an error that says nothing", []string{"p; error=http_protocol_error"}, nil},
		{"the text of an error", []string{`p; details="; error=connection_refused \"; error=connection_refused"`}, nil},
		{"the first of two", []string{"a; error=connection_limit_reached, b; error=connection_refused"}, ErrLate},
		{"in the second line", []string{"a; received-status=503", "b; error=connection_refused"}, ErrUnreachable},
	} {
		if got := proxyStatus(tc.values); !errors.Is(got, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}
