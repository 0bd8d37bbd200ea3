// try is a static program for containers, at clients.GoFile. It runs the clients that are in the container, and prints
// the outcome of each as one line.
//
//	try get URL        get a URL as a client of Go's
//	try run URL [NAME] run the client with a name, or all; an asterisk in the URL stands for the client's label
//	try idle           do nothing until the end
//	try connect ADDR N connect N times, and print how many microseconds each connect(2) takes
package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-cni/sluice/integration/clients"
)

func main() { os.Exit(run(os.Args[1:])) }

// run returns the exit code. It is 2 for wrong arguments, and tells nothing of the outcomes.
func run(args []string) int {
	switch {
	case len(args) == 2 && args[0] == clients.GetCommand:
		return clients.Get(args[1])
	case len(args) == 1 && args[0] == clients.IdleCommand:
		end := make(chan os.Signal, 1)
		signal.Notify(end, unix.SIGTERM)
		<-end
		return 0
	case len(args) == 3 && args[0] == clients.ConnectCommand:
		return connect(args[1], args[2])
	case len(args) >= 2 && args[0] == clients.RunCommand:
		url, name := args[1], strings.Join(args[2:], " ")
		for _, c := range clients.In("/") {
			if name == "" || c.Name == name {
				output, ok := c.Try(execute, strings.ReplaceAll(url, "*", c.Label()))
				clients.Outcome{Client: c.Name, OK: ok, Output: output}.Print(os.Stdout)
			}
		}
		return 0
	}
	return 2
}

func connect(address, times string) int {
	count, err := strconv.Atoi(times)
	if err != nil {
		return 2
	}
	for range count {
		begun := time.Now()
		conn, err := net.Dial("tcp", address)
		took := time.Since(begun)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		_ = conn.Close() // nothing was sent
		fmt.Println(took.Microseconds())
	}
	return 0
}

// execute runs a program in the container's environment.
func execute(env []string, input string, args ...string) (string, error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
