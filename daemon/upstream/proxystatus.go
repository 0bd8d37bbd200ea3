package upstream

import (
	"fmt"
	"regexp"
)

// statusErrors are the errors of Proxy-Status (RFC 9209, section 2.3) that say which side has failed.
var statusErrors = map[string]error{
	"destination_not_found":     ErrUnreachable,
	"destination_unavailable":   ErrUnreachable,
	"destination_ip_prohibited": ErrUnreachable,
	"destination_ip_unroutable": ErrUnreachable,
	"connection_refused":        ErrUnreachable,
	"connection_terminated":     ErrUnreachable,
	"connection_timeout":        ErrUnreachable,
	"http_request_denied":       ErrUnreachable,
	"connection_limit_reached":  ErrLate,
	"proxy_internal_error":      ErrLate,
	"proxy_configuration_error": ErrMisconfigured,
	"proxy_loop_detected":       ErrMisconfigured,
}

var (
	// quoted matches strings of structured fields (RFC 8941, section 3.3.3). They may contain anything.
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	// statusError matches the error parameter of a member.
	statusError = regexp.MustCompile(`; *error=([a-z_]+)`)
)

// proxyStatus interprets the header Proxy-Status. It returns nil if the header does not tell which side has failed. The
// first member with an error counts: it is that of the proxy that is closest to the destination.
func proxyStatus(values []string) error {
	for _, value := range values {
		m := statusError.FindStringSubmatch(quoted.ReplaceAllString(value, ""))
		if m == nil {
			continue
		}
		if means := statusErrors[m[1]]; means != nil {
			return fmt.Errorf("%w: Proxy-Status has %s", means, m[1])
		}
		return nil
	}
	return nil
}
