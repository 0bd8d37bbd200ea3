package truststore

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/integration/oci"
	"github.com/sluice-cni/sluice/plugin/truststore"
)

var tableFile = flag.String("table", "", "write the table of clients to this file; for `make trust-table`")

// image is an image of the table, made by integration/images.sh.
type image struct {
	name   string
	layers []string // folders in bin/images, the top one first
	env    []string
	bare   bool // some clients give up before they connect
}

var images = []image{
	{name: "Debian 12", layers: []string{"debian12"}},
	{name: "Debian 13", layers: []string{"debian13"}},
	{name: "like Alpine", layers: []string{"alpine", "debian13"}},
	{name: "like RHEL", layers: []string{"rhel", "debian12"}},
	{name: "distroless", layers: []string{"distroless"},
		env: []string{"SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"}}, // as in the real images
	{name: "no bundle", layers: []string{"bare", "debian13"}, bare: true},
	{name: "BusyBox", layers: []string{"busybox"}},
}

// find returns the image's folders.
func (i image) find(t *testing.T) oci.Image {
	t.Helper()
	found := oci.Image{Env: i.env}
	for _, layer := range i.layers {
		folder := filepath.Join(page.Root(t), "bin", "images", layer)
		if _, err := os.Stat(folder); err != nil {
			t.Fatalf("integration/images.sh install makes the images: %v", err)
		}
		found.Layers = append(found.Layers, folder)
	}
	return found
}

// outcome tells which modes make a client trust the CA, in the order of modes.
type outcome [3]bool

// The cells of the table.
const (
	absent      = "–"
	either      = "yes"
	hookOnly    = "hook"
	environment = "environment"
	both        = "both"
	neither     = "no"
)

// cell is the outcome as the table shows it.
func (o outcome) cell() string {
	all, hook, env := o[0], o[1], o[2]
	switch {
	case !all:
		return neither
	case hook && env:
		return either
	case hook:
		return hookOnly
	case env:
		return environment
	default:
		return both
	}
}

// table has the outcomes by client and image.
type table struct {
	mu       sync.Mutex
	outcomes map[[2]string]outcome
	// silent are the clients that refuse without an alert: the handshake succeeds, and then they hang up.
	silent map[string]bool
}

func newTable() *table { return &table{outcomes: map[[2]string]outcome{}, silent: map[string]bool{}} }

func (tb *table) record(client, image string, mode int) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	key := [2]string{client, image}
	o := tb.outcomes[key]
	o[mode] = true
	tb.outcomes[key] = o
}

// begin records that an image has a client, and how that refuses.
func (tb *table) begin(client, image string, silent bool) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.outcomes[[2]string{client, image}] = outcome{}
	tb.silent[client] = tb.silent[client] || silent
}

// markdown is the table: a row for each client, a column for each image.
func (tb *table) markdown() string {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	var out strings.Builder
	out.WriteString("| client |")
	for _, i := range images {
		fmt.Fprintf(&out, " %s |", i.name)
	}
	fmt.Fprintf(&out, " %s |\n|%s\n", alertsColumn, strings.Repeat(" --- |", len(images)+2))
	for _, c := range clients.All {
		fmt.Fprintf(&out, "| %s |", c.Name)
		for _, i := range images {
			cell := absent
			if o, ok := tb.outcomes[[2]string{c.Name, i.name}]; ok {
				cell = o.cell()
			}
			fmt.Fprintf(&out, " %s |", cell)
		}
		fmt.Fprintf(&out, " %s |\n", map[bool]string{true: "no", false: "yes"}[tb.silent[c.Name]])
	}
	return out.String()
}

// run runs all clients of an image in all modes.
func (tb *table) run(t *testing.T, i image, made oci.Image) {
	t.Helper()
	ca := newAuthority(t)
	sluiced := newSluiced(t, ca)
	tb.refuse(t, i, made, ca)
	for number, m := range modes {
		c := newIdle(t, made)
		adjust(sluiced, c, m)
		c.Start()
		report := sluiced.Report(c)
		t.Logf("%s: %s", m.name, summary(report))
		if m.hook && report.State != truststore.Trusted {
			t.Errorf("%s: the state is %s", m.name, report.State)
		}
		for _, client := range clients.In(c.Root) {
			got := ca.get(t, c, client)
			switch {
			case got.ok:
				tb.record(client.Name, i.name, number)
			case m == modes[0]:
				t.Errorf("%s does not trust the CA: %s", client.Name, lastLines(got.output))
			default:
				t.Logf("%s alone: %s does not trust the CA: %s", m.name, client.Name, lastLines(got.output))
			}
		}
	}
}

// refuse checks that no client trusts the CA when nothing is added: a client that does proves nothing.
func (tb *table) refuse(t *testing.T, i image, made oci.Image, ca authority) {
	t.Helper()
	c := newIdle(t, made)
	c.Start()
	for _, client := range clients.In(c.Root) {
		got := ca.get(t, c, client)
		if got.ok {
			t.Errorf("%s trusts the CA though nothing is added: %s", client.Name, got.output)
		}
		tb.begin(client.Name, i.name, !got.refused && !i.bare)
	}
}

// attempt is the outcome of a client's attempt to get something.
type attempt struct {
	ok bool
	// refused: a handshake failed, so the proxy knows that the client does not trust the CA.
	refused bool
	output  string
}

// get lets a client get something from the authority's server.
func (a authority) get(t *testing.T, c *oci.Container, client clients.Client) attempt {
	t.Helper()
	before := a.refusals.count(t)
	out, ok := client.Try(c.Exec, a.url)
	return attempt{ok: ok, refused: a.refusals.count(t) > before, output: out}
}

func summary(r truststore.Report) string {
	var stores []string
	for _, s := range r.Stores {
		stores = append(stores, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", s.Kind, s.Path, s.Action, s.Error)))
	}
	return fmt.Sprintf("%s %s: %s", r.State, r.Error, strings.Join(stores, ", "))
}

// lastLines shortens the output of a client.
func lastLines(out string) string {
	const most = 300
	if out = strings.Join(strings.Fields(out), " "); len(out) > most {
		return "…" + out[len(out)-most:]
	}
	return out
}

// TestTable runs all clients in all images: `make trust-table`. The manual has the table.
func TestTable(t *testing.T) {
	if *tableFile == "" {
		t.Skip("it is for `make trust-table`")
	}
	tb := newTable()
	t.Run("images", func(t *testing.T) {
		for _, i := range images {
			t.Run(i.name, func(t *testing.T) {
				t.Parallel()
				tb.run(t, i, i.find(t))
			})
		}
	})
	made := tb.markdown()
	if err := os.WriteFile(*tableFile, []byte(made), 0o600); err != nil {
		t.Fatal(err)
	}
	got := page.Parse("the output", "# Table\n"+made).Rows(t, "Table", "client")
	if manual := page.Read(t, manualPage).Rows(t, tableHeading, "client"); !slices.EqualFunc(got, manual, maps.Equal) {
		t.Errorf("%s has another table than\n%s", manualPage, made)
	}
}

// TestClients is the table for the clients that this machine has.
func TestClients(t *testing.T) {
	newTable().run(t, image{name: "this machine"}, oci.Machine(t))
}

const (
	manualPage   = "docs/clients.md"
	tableHeading = "The table"
	alertsColumn = "sends an alert"
)

// TestManual: the table of the manual has every client and image, and no failure.
func TestManual(t *testing.T) {
	manual := page.Read(t, manualPage)
	var named, want []string
	cells := []string{either, hookOnly, environment, absent}
	for _, row := range manual.Rows(t, tableHeading, "client") {
		named = append(named, row["client"])
		for _, i := range images {
			if !slices.Contains(cells, row[i.name]) {
				t.Errorf("%s in %s: %q", row["client"], i.name, row[i.name])
			}
		}
	}
	for _, c := range clients.All {
		want = append(want, c.Name)
	}
	if !slices.Equal(named, want) {
		t.Errorf("the table has the clients %q, want %q", named, want)
	}
	page.Compare(t, "the cells of the table", manual.Table(t, tableHeading, "cell"), cells)
}
