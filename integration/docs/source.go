// Package docs tests the documentation: that its tables have the names that the code has, and that its commands run.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluice-cni/sluice/integration/docs/page"
)

// source is a file of the code, without tests.
type source struct {
	path string
	file *ast.File
}

// sources parses the Go files of the directories, which are relative to the repository's root, and of all directories
// below them.
func sources(tb page.TB, dirs ...string) []source {
	tb.Helper()
	var all []source
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(page.Root(tb), dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			all = append(all, source{path, file})
			return err
		})
		if err != nil {
			tb.Fatalf("reading the code: %v", err)
		}
	}
	return all
}

// literals returns the values of all literals of a kind: those of strings without their quotes.
func literals(files []source, kind token.Token) (values []string) {
	for _, f := range files {
		ast.Inspect(f.file, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == kind {
				values = append(values, value(l))
			}
			return true
		})
	}
	return values
}

func value(l *ast.BasicLit) string {
	if text, err := strconv.Unquote(l.Value); err == nil && l.Kind == token.STRING {
		return text
	}
	return l.Value
}

// calls calls visit for every call of a method or function that is selected from something: receiver.name(args).
func calls(files []source, visit func(f source, receiver ast.Expr, name string, args []ast.Expr)) {
	for _, f := range files {
		ast.Inspect(f.file, func(n ast.Node) bool {
			if c, ok := n.(*ast.CallExpr); ok {
				if s, ok := c.Fun.(*ast.SelectorExpr); ok {
					visit(f, s.X, s.Sel.Name, c.Args)
				}
			}
			return true
		})
	}
}

// logKeys returns the keys of the attributes in log calls. A key that is not a literal is reported.
func logKeys(tb page.TB, files []source) (keys []string) {
	tb.Helper()
	// The number of arguments before the attributes.
	first := map[string]int{"Debug": 1, "Info": 1, "Warn": 1, "Error": 1, "With": 0, "Log": 3}
	calls(files, func(f source, receiver ast.Expr, name string, args []ast.Expr) {
		name, isContext := strings.CutSuffix(name, "Context")
		skip, ok := first[name]
		switch {
		case identifier(receiver) == "slog" && isAttribute(name) && len(args) > 0:
			args = args[:1]
		case ok && isLogger(receiver):
			if isContext {
				skip++
			}
			args = args[min(skip, len(args)):]
		default:
			return
		}
		for i := 0; i < len(args); i += 2 {
			if c, ok := args[i].(*ast.CallExpr); ok && isSlogCall(c) { // slog.String(…) in place of a key and a value
				i--
				continue
			}
			key, ok := args[i].(*ast.BasicLit)
			if !ok || key.Kind != token.STRING {
				tb.Errorf("%s: a log call has a key that is not a literal", f.path)
				continue
			}
			keys = append(keys, value(key))
		}
	})
	return keys
}

// warnings returns the messages of the log calls of the levels WARN and ERROR, and of the calls with a
// variable level, with their levels.
func warnings(files []source) map[string]string {
	messages := map[string]string{}
	calls(files, func(_ source, receiver ast.Expr, name string, args []ast.Expr) {
		name, isContext := strings.CutSuffix(name, "Context")
		at, level := 0, strings.ToUpper(name)
		switch name {
		case "Warn", "Error":
		case "Log":
			at, level = 2, ""
		default:
			return
		}
		if isContext {
			at++
		}
		if isLogger(receiver) && at < len(args) {
			messages[text(args[at])] = level
		}
	})
	return messages
}

// text returns the value of a string that may be a sum of literals. Parts that are not literals are left out.
func text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		return value(e)
	case *ast.BinaryExpr:
		return text(e.X) + text(e.Y)
	}
	return ""
}

// texts returns the values of all strings, where a sum of literals is one.
func texts(files []source) (all []string) {
	for _, f := range files {
		ast.Inspect(f.file, func(n ast.Node) bool {
			if e, ok := n.(ast.Expr); ok {
				if t := text(e); t != "" {
					all = append(all, t)
				}
			}
			return true
		})
	}
	return all
}

// isLogger tells, by its name, whether an expression is a logger: log, Log, logger, h.log, slog, log.With(…).
func isLogger(e ast.Expr) bool {
	if c, ok := e.(*ast.CallExpr); ok {
		s, ok := c.Fun.(*ast.SelectorExpr)
		return ok && s.Sel.Name == "With" && isLogger(s.X)
	}
	switch identifier(e) {
	case "log", "Log", "logger", "Logger", "slog":
		return true
	}
	return false
}

func isSlogCall(c *ast.CallExpr) bool {
	s, ok := c.Fun.(*ast.SelectorExpr)
	return ok && identifier(s.X) == "slog"
}

// isAttribute tells whether the function of that name in package slog makes an attribute.
func isAttribute(name string) bool {
	switch name {
	case "String", "Int", "Int64", "Uint64", "Float64", "Bool", "Time", "Duration", "Any", "Group":
		return true
	}
	return false
}

// identifier returns the last name of an expression such as a.b.c.
func identifier(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
