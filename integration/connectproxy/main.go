// Command connectproxy is a small and fast HTTP CONNECT proxy: the upstream of the benchmark, of tests, and of the demo
// on machines without mitmproxy. It also takes SOCKS5 and the PROXY protocol. With -sockets it also accepts connections
// in the netns of captured pods.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"sync"

	"github.com/sluice-cni/sluice/integration/connectproxy/handshake"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:18080", "listen on this `address`")
	quiet := flag.Bool("quiet", false, "do not log each connection")
	sluiced := flag.String("sockets", "", "also receive the listening sockets of pods from sluiced at this `path`")
	flag.Parse()
	if *sluiced != "" {
		t := &taker{path: *sluiced, quiet: *quiet}
		go t.run()
	}
	fmt.Fprintln(os.Stderr, "connectproxy:", run(*listen, *quiet))
	os.Exit(1)
}

// run serves until it can no longer accept connections. It always returns an error.
func run(listen string, quiet bool) error {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	log.Printf("listening on %s", l.Addr())
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			if err := serve(c.(*net.TCPConn), quiet); err != nil && !quiet {
				log.Printf("%s: %v", c.RemoteAddr(), err)
			}
		}()
	}
}

// serve serves one client, and closes its connection.
func serve(client *net.TCPConn, quiet bool) error {
	defer client.Close() //nolint:errcheck // all data have been sent, or the connection has failed already
	in := bufio.NewReader(client)
	req, err := handshake.Read(client, in)
	if err != nil {
		return ignoreEOF(err)
	}
	c, err := net.Dial("tcp", req.Destination)
	if err != nil {
		_, err := io.WriteString(client, req.Failed)
		return err
	}
	server := c.(*net.TCPConn)
	defer server.Close() //nolint:errcheck // as above
	if !quiet {
		log.Printf("CONNECT %s for %s/%s", req.Destination,
			req.Header.Get("Sluice-Pod-Namespace"), req.Header.Get("Sluice-Pod-Name"))
	}
	if _, err := io.WriteString(client, req.Connected); err != nil {
		return err
	}
	early, _ := in.Peek(in.Buffered())
	if _, err := server.Write(early); err != nil {
		return err
	}
	join(client, server)
	return nil
}

// join copies between two connections in both directions, until both directions have ended.
func join(client, server *net.TCPConn) {
	var wg sync.WaitGroup
	wg.Go(func() { carry(server, client) })
	wg.Go(func() { carry(client, server) })
	wg.Wait()
}

// carry copies one direction, and passes a half-close on. After an error it ends both connections, the one that it
// writes to with a reset.
func carry(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		_ = to.SetLinger(0)
		_ = to.Close()
		_ = from.Close()
		return
	}
	_ = to.CloseWrite()
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) { // a probe, which connects and sends nothing
		return nil
	}
	return err
}
