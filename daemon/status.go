package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func statusCommand() *cobra.Command {
	var socket string
	var asJSON, ready, alive bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the proxy and of each captured pod",
		Long: `status asks the running daemon. It shows whether the proxy (the upstream) is ready and for how long, and
one line for each attachment, that is for each network interface of a pod that the plugin has handled:

  STATE    captured, not captured, or provisional: captured until the daemon knows the pod's labels
  WAITING  connections that wait for the proxy
  OPEN     connections that the proxy carries
  BYTES    bytes relayed in both directions
  TRUST    how far the pod's containers trust the proxy's CA, if sluice gives it to some pod: trusted, files-only or
           unknown

Below the table are packets that were stopped. They would have left the pod around the proxy if the cause is "pod" (a
raw socket, or a connection that the kernel has forgotten), "nested" (a container in the pod) or "packet" (a packet
socket, or a network stack of its own such as gVisor's). The configuration rejects the causes "quic" and "other".

It fails if the daemon does not answer.`,
		Example: `  # Show the table.
  sluiced status

  # Print the number of waiting connections of each pod.
  sluiced status --json | jq -r '.attachments[] | "\(.pod) \(.waiting)"'

  # Use it as a readiness probe.
  sluiced status --ready

  # Use it as a liveness probe of one of two daemons, which was started with --probe-socket.
  sluiced status --alive --agent-socket /run/sluiced/probe.sock`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			daemon := attach.NewClient(socket)
			switch {
			case alive:
				return daemon.Alive(cmd.Context())
			case ready:
				return askReady(cmd.Context(), daemon)
			}
			s, err := daemon.Status(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(s)
			}
			return printStatus(cmd.OutOrStdout(), s)
		},
	}
	socketFlag(c, &socket)
	c.Flags().BoolVar(&asJSON, "json", false, "print the status as JSON (default: a table)")
	c.Flags().BoolVar(&ready, "ready", false,
		"print nothing, and fail unless the daemon serves: it has taken over the node's pods, the plugin is\n"+
			"installed (with run --install) and the API server has listed the node's pods (with capture.source "+
			"kubernetes).\nA late proxy is no failure (default: show the status)")
	c.Flags().BoolVar(&alive, "alive", false,
		"print nothing, and fail if the daemon hangs (default: show the status)")
	c.MarkFlagsMutuallyExclusive("json", "ready", "alive")
	return c
}

// askReady returns an error unless the daemon is ready. It asks for the status without the attachments, which are
// costly to collect: probes ask every few seconds.
func askReady(ctx context.Context, daemon *attach.Client) error {
	s, err := daemon.Summary(ctx)
	if err == nil && s.NotReady != "" {
		err = errors.New(s.NotReady)
	}
	return err
}

// socketFlag adds the flag --agent-socket to c.
func socketFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "agent-socket", attach.DefaultSocket,
		"`path` of the daemon's unix socket (agentSocket in its configuration)")
}

// printStatus writes the status as text: the upstream, its proxies, a table of attachments, and their notes.
func printStatus(w io.Writer, s attach.Status) error {
	state := "ready"
	if !s.Upstream.Ready {
		state = "LATE"
	}
	fmt.Fprintf(w, "upstream %s (%s): %s for %s", s.Upstream.Address, s.Upstream.Protocol, state, age(s.Upstream.Since))
	if s.Upstream.Reason != "" {
		fmt.Fprintf(w, ": %s", s.Upstream.Reason)
	}
	fmt.Fprint(w, "\n")
	for _, p := range s.Upstream.Proxies {
		answers := ""
		if p.Hangs {
			answers = "; it does NOT ANSWER"
		}
		fmt.Fprintf(w, "  proxy %s, for %s: sockets of %d pods, %d connections%s\n",
			p.Name, age(p.Since), p.Pods, p.Connections, answers)
	}
	fmt.Fprintln(w)
	if s.NotReady != "" {
		fmt.Fprintf(w, "not ready: %s\n\n", s.NotReady)
	}
	if len(s.Attachments) == 0 {
		fmt.Fprintln(w, "no attachments")
		return printUncaptured(w, s.Uncaptured)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "POD\tATTACHMENT\tSTATE\tWAITING\tOPEN\tBYTES")
	withTrust := slices.ContainsFunc(s.Attachments, func(a attach.AttachmentStatus) bool { return a.Trust != "" })
	if withTrust {
		fmt.Fprint(t, "\tTRUST")
	}
	fmt.Fprintln(t)
	for _, a := range s.Attachments {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s",
			a.Pod, shorten(a.Attachment), a.State, a.Waiting, a.Open, size(a.Bytes))
		if withTrust {
			fmt.Fprintf(t, "\t%s", cmp.Or(a.Trust, "-"))
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, a := range s.Attachments {
		for _, cause := range slices.Sorted(maps.Keys(a.Stopped)) {
			fmt.Fprintf(w, "\n%s: %d packets were stopped, by the cause %q\n", a.Pod, a.Stopped[cause], cause)
		}
		for _, note := range a.Notes {
			fmt.Fprintf(w, "\n%s: %s\n", a.Pod, note)
		}
	}
	return printUncaptured(w, s.Uncaptured)
}

// printUncaptured writes a line for each pod that opted in and is not captured.
func printUncaptured(w io.Writer, pods []attach.UncapturedPod) error {
	for _, p := range pods {
		if _, err := fmt.Fprintf(w, "\n%s: it opted in and is NOT CAPTURED: %s\n", p.Pod, p.Reason); err != nil {
			return err
		}
	}
	return nil
}

// shorten cuts the container ID of an attachment to 12 characters, as container tools do.
func shorten(attachment string) string {
	id, err := attach.ParseID(attachment)
	if err != nil || len(id.ContainerID) <= 12 {
		return attachment
	}
	id.ContainerID = id.ContainerID[:12]
	return id.String()
}

// age is the time since then, to a tenth of a second, or to a second if it is more than a minute.
func age(since time.Time) string {
	d := time.Since(since)
	if d > time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

// size is a number of bytes in a few characters, with decimal units: 512, 1.4k, 23.1M.
func size(n uint64) string {
	const units = "kMGTPE"
	if n < 1000 {
		return fmt.Sprint(n)
	}
	f, i := float64(n)/1000, 0
	for f >= 1000 {
		f, i = f/1000, i+1
	}
	return fmt.Sprintf("%.1f%c", f, units[i])
}
