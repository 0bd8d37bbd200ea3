package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-cni/sluice/plugin/attach"
)

func statusCommand() *cobra.Command {
	var socket string
	var asJSON, ready bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the upstream and what waits for it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			daemon := attach.NewClient(socket)
			if ready {
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
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().BoolVar(&ready, "ready", false, "show nothing; fail unless the daemon serves as it should: installed, and in sync with the API server")
	return c
}

// askReady leaves out what takes the daemon time to find: probes ask every few seconds.
func askReady(ctx context.Context, daemon *attach.Client) error {
	s, err := daemon.Summary(ctx)
	if err == nil && s.NotReady != "" {
		err = errors.New(s.NotReady)
	}
	return err
}

func socketFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "agent-socket", attach.DefaultSocket, "the daemon's socket")
}

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
		fmt.Fprintf(w, "  proxy %s, for %s: sockets of %d pods, %d connections%s\n", p.Name, age(p.Since), p.Pods, p.Connections, answers)
	}
	fmt.Fprintln(w)
	if s.NotReady != "" {
		fmt.Fprintf(w, "not ready: %s\n\n", s.NotReady)
	}
	if len(s.Attachments) == 0 {
		_, err := fmt.Fprintln(w, "no attachments")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "POD\tATTACHMENT\tSTATE\tWAITING\tOPEN\tBYTES")
	for _, a := range s.Attachments {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\n", a.Pod, shorten(a.Attachment), a.State, a.Waiting, a.Open, size(a.Bytes))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, a := range s.Attachments {
		for _, note := range a.Notes {
			fmt.Fprintf(w, "\n%s: %s\n", a.Pod, note)
		}
	}
	return nil
}

// shorten cuts a container ID as the container tools do.
func shorten(attachment string) string {
	id, err := attach.ParseID(attachment)
	if err != nil || len(id.ContainerID) <= 12 {
		return attachment
	}
	id.ContainerID = id.ContainerID[:12]
	return id.String()
}

func age(since time.Time) string {
	d := time.Since(since)
	if d > time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

// size is what fits a column: 512, 1.4k, 23.1M.
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
