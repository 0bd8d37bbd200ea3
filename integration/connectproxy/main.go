// Command connectproxy is a small fast HTTP CONNECT proxy: the upstream of benchmarks, of tests that need one
// which can be told how to behave, and of the demo where mitmproxy cannot be had.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:18080", "address to listen on")
	quiet := flag.Bool("quiet", false, "do not log each connection")
	sluiced := flag.String("sockets", "", "take the sockets of pods from sluiced at this path, too")
	flag.Parse()
	if *sluiced != "" {
		t := &taker{path: *sluiced, quiet: *quiet}
		go t.run()
	}
	fmt.Fprintln(os.Stderr, "connectproxy:", run(*listen, *quiet))
	os.Exit(1)
}

// run returns only when it cannot go on.
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

// serve owns client.
func serve(client *net.TCPConn, quiet bool) error {
	defer client.Close() //nolint:errcheck // whatever there was to say has been said
	in := bufio.NewReader(client)
	req, err := http.ReadRequest(in)
	if err != nil {
		return ignoreEOF(err)
	}
	if req.Method != http.MethodConnect {
		return say(client, "405 Method Not Allowed")
	}
	c, err := net.Dial("tcp", req.Host)
	if err != nil {
		return say(client, "502 Bad Gateway")
	}
	server := c.(*net.TCPConn)
	defer server.Close() //nolint:errcheck // as above
	if !quiet {
		log.Printf("CONNECT %s for %s/%s", req.Host, req.Header.Get("Sluice-Pod-Namespace"), req.Header.Get("Sluice-Pod-Name"))
	}
	if _, err := io.WriteString(client, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return err
	}
	early, _ := in.Peek(in.Buffered())
	if _, err := server.Write(early); err != nil {
		return err
	}
	join(client, server)
	return nil
}

func join(client, server *net.TCPConn) {
	var wg sync.WaitGroup
	wg.Go(func() { carry(server, client) })
	wg.Go(func() { carry(client, server) })
	wg.Wait()
}

func say(c net.Conn, status string) error {
	_, err := fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", status)
	return err
}

// carry copies one direction and passes its end on; an error ends both.
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
	if errors.Is(err, io.EOF) { // somebody looked whether we are here
		return nil
	}
	return err
}
