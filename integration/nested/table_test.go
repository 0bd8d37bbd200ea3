package nested

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-cni/sluice/integration/clients"
)

var tableFile = flag.String("table", "", "write the tables of nested containers to this file; for `make nested-table`")

// TestTable runs all clients in all images in all ways: `make nested-table`. In images with a trust store 98 % of them
// get their answer.
func TestTable(t *testing.T) {
	if *tableFile == "" {
		t.Skip("it is for `make nested-table`")
	}
	l := newLab(t, inspect())
	l.startMore(inspect())
	var done []image
	var results []result
	for _, i := range madeImages(t) { // the tables are written after each, because all take long
		done, results = append(done, i), append(results, l.tryAll(t, []image{i}, ways)...)
		made := byWay(done, results) + "\n" + byClient(done, results) + "\n" + failures(results)
		if err := os.WriteFile(*tableFile, []byte(made), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ok, all := tally(results, func(r result) bool { return r.image != withoutStore })
	t.Logf("%d of %d starts got their answer", ok, all)
	if ok*100 < all*98 {
		t.Error("that is less than 98 %")
	}
}

// tally counts some results, and those of them that are ok.
func tally(results []result, among func(result) bool) (ok, all int) {
	for _, r := range results {
		if among(r) {
			all++
			if r.ok {
				ok++
			}
		}
	}
	return ok, all
}

// count is the part of some results that are ok, as the tables show it.
func count(results []result, among func(result) bool) string {
	ok, all := tally(results, among)
	if all == 0 {
		return "–"
	}
	return fmt.Sprintf("%d of %d", ok, all)
}

// byWay is a table with a row for each way, and a column for each image.
func byWay(images []image, results []result) string {
	var out strings.Builder
	header(&out, "started by", "kind", images)
	for _, w := range ways {
		fmt.Fprintf(&out, "| %s | %s |", w.program, w.kind)
		for _, i := range images {
			cell := count(results, func(r result) bool { return r.image == i.name && r.way.String() == w.String() })
			fmt.Fprintf(&out, " %s |", cell)
		}
		out.WriteString("\n")
	}
	return out.String()
}

// byClient is a table with a row for each client, and a column for each image.
func byClient(images []image, results []result) string {
	var out strings.Builder
	header(&out, "client", "all images", images)
	for _, c := range clients.All {
		fmt.Fprintf(&out, "| %s | %s |", c.Name, count(results, func(r result) bool { return r.client == c.Name }))
		for _, i := range images {
			cell := count(results, func(r result) bool { return r.image == i.name && r.client == c.Name })
			fmt.Fprintf(&out, " %s |", cell)
		}
		out.WriteString("\n")
	}
	return out.String()
}

func header(out *strings.Builder, first, second string, images []image) {
	fmt.Fprintf(out, "| %s | %s |", first, second)
	for _, i := range images {
		fmt.Fprintf(out, " %s |", i.name)
	}
	fmt.Fprintf(out, "\n|%s\n", strings.Repeat(" --- |", len(images)+2))
}

// failures is a list of the clients that fail in an image, with the ways and one message.
func failures(results []result) string {
	type key struct{ client, image string }
	failed := map[key][]result{}
	var order []key
	for _, r := range results {
		k := key{r.client, r.image}
		if r.ok {
			continue
		}
		if !slices.Contains(order, k) {
			order = append(order, k)
		}
		failed[k] = append(failed[k], r)
	}
	var out strings.Builder
	for _, k := range order {
		var in []string
		for _, r := range failed[k] {
			in = append(in, r.way.String())
		}
		fmt.Fprintf(&out, "- %s in %s, %d ways (%s): %s\n", k.client, k.image, len(in), strings.Join(in, "; "),
			failed[k][0].output)
	}
	return out.String()
}
