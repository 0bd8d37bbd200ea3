package main

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestDocumentedCommands compares the table of each command's flags with the flags that the command has.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	p := page.Read(t, page.Configuration)
	headings := map[string]string{}
	for _, heading := range p.Headings() {
		if strings.HasPrefix(heading, "sluiced ") {
			headings[heading] = heading
		}
	}
	var commands []string
	walk(command(), func(c *cobra.Command) {
		commands = append(commands, c.CommandPath())
		if headings[c.CommandPath()] != "" {
			compareFlags(t, c, p.Table(t, c.CommandPath(), "flag"))
		}
	})
	page.Compare(t, "commands", headings, commands)
}

// walk calls visit for every command that does something.
func walk(c *cobra.Command, visit func(*cobra.Command)) {
	if c.Runnable() {
		visit(c)
	}
	for _, sub := range c.Commands() {
		walk(sub, visit)
	}
}

func compareFlags(t *testing.T, c *cobra.Command, rows map[string]page.Row) {
	t.Helper()
	var flags []string
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		name := "--" + f.Name
		if name == "--help" || name == "--version" {
			return
		}
		flags = append(flags, name)
		if row := rows[name]; row != nil && page.Code(row["default"]) != f.DefValue {
			t.Errorf("%s %s: the page has the default %s, the code %q",
				c.CommandPath(), name, row["default"], f.DefValue)
		}
	})
	page.Compare(t, "flags of "+c.CommandPath(), rows, flags)
}

// TestDocumentedStatus compares the table of the fields of `sluiced status --json` with the type that is printed.
func TestDocumentedStatus(t *testing.T) {
	t.Parallel()
	rows := page.Read(t, page.Configuration).Table(t, "sluiced status", "field")
	page.Compare(t, "fields of sluiced status --json", rows, fields("", reflect.TypeFor[attach.Status]()))
}

// fields lists the paths of the leaves of a type in JSON.
func fields(path string, of reflect.Type) []string {
	switch {
	case of.Kind() == reflect.Struct && of.PkgPath() == reflect.TypeFor[attach.Status]().PkgPath():
		var all []string
		for f := range of.Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			all = append(all, fields(strings.TrimPrefix(path+"."+name, "."), f.Type)...)
		}
		return all
	case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.Struct:
		return fields(path+"[]", of.Elem())
	default:
		return []string{path}
	}
}
