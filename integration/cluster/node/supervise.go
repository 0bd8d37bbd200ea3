package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// componentTimeout is the time in which a component must become ready, on a busy machine too.
const componentTimeout = 2 * time.Minute

// supervisor starts the node's components, and restarts them when they end.
type supervisor struct {
	Config
	report *os.File
	begun  time.Time
}

// supervise runs the node's components in the node's namespaces, until it receives SIGINT or SIGTERM.
func supervise(argument string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &supervisor{report: os.NewFile(reportFD, "report"), begun: time.Now()}
	if err := json.Unmarshal([]byte(argument), &s.Config); err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	api := os.NewFile(apiFD, "api")
	listener, err := net.FileListener(api)
	if err != nil {
		return fmt.Errorf("taking the listener for the API server: %w", err)
	}
	_ = api.Close() // the listener has a duplicate of the descriptor
	go forward(listener, fmt.Sprintf("127.0.0.1:%d", s.Port))
	if err := s.start(ctx); err != nil {
		fmt.Fprintln(s.report, err)
		return err
	}
	fmt.Fprintln(s.report, lineReady)
	_ = s.report.Close() // follow has returned
	<-ctx.Done()
	return ctx.Err()
}

// start starts the components, each after those that it needs.
func (s *supervisor) start(ctx context.Context) error {
	if err := os.Mkdir(stoppedDir, 0o755); err != nil {
		return err
	}
	if err := makeNetwork(ctx); err != nil {
		return fmt.Errorf("making the node's network: %w", err)
	}
	var first errgroup.Group
	first.Go(func() error {
		if err := s.run(ctx, s.containerd()); err != nil {
			return err
		}
		return s.do(ctx, "sandbox image imported", "ctr", "-n", "k8s.io", "images", "import", pauseTar)
	})
	first.Go(func() error {
		if err := s.run(ctx, s.etcd()); err != nil {
			return err
		}
		return s.run(ctx, s.apiserver())
	})
	if err := first.Wait(); err != nil {
		return err
	}
	var second errgroup.Group
	for _, c := range []component{s.controllerManager(), s.scheduler(), s.kubelet(), s.proxy()} {
		second.Go(func() error { return s.run(ctx, c) })
	}
	if err := second.Wait(); err != nil {
		return err
	}
	for _, object := range []string{"node/" + Name, "serviceaccount/default"} {
		if err := s.do(ctx, object, "kubectl", "wait", "--for=create", "--timeout=60s", object); err != nil {
			return err
		}
	}
	err := s.do(ctx, "node is Ready", "kubectl", "wait", "--for=condition=Ready", "--timeout=120s", "node/"+Name)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, tail("kubelet"))
	}
	return nil
}

// do runs a command and waits for it. step names it in the progress report.
func (s *supervisor) do(ctx context.Context, step, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %s %q: %w: %s", step, name, args, err, out)
	}
	s.progress(step)
	return nil
}

func (s *supervisor) progress(step string) {
	fmt.Fprintf(s.report, "%s%5.1fs  %s\n", lineProgress, time.Since(s.begun).Seconds(), step)
}

// run starts a component and returns when it is ready. From then on, the component is restarted when it ends.
func (s *supervisor) run(ctx context.Context, c component) error {
	ended, err := launch(ctx, c)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(componentTimeout); ; {
		once, cancel := context.WithTimeout(ctx, 5*time.Second)
		notReady := c.ready(once)
		cancel()
		if notReady == nil {
			break
		}
		select {
		case err := <-ended:
			return fmt.Errorf("%s has ended: %w\n%s", c.name, err, tail(c.name))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not ready after %s: %w\n%s", c.name, componentTimeout, notReady, tail(c.name))
		}
	}
	s.progress(c.name)
	go restart(ctx, c, ended)
	return nil
}

// stoppedDir contains a file for each component that must stay down. Tests create such a file to stop a component.
const stoppedDir = "/run/stopped"

// restart starts a component again each time it ends, until ctx ends.
func restart(ctx context.Context, c component, ended <-chan error) {
	for {
		select {
		case err := <-ended:
			fmt.Fprintf(os.Stderr, "%s %s has ended: %v\n", time.Now().Format(time.RFC3339), c.name, err)
		case <-ctx.Done():
			return
		}
		for stopped := true; stopped; {
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return
			}
			_, err := os.Stat(filepath.Join(stoppedDir, c.name))
			stopped = err == nil
		}
		var err error
		if ended, err = launch(ctx, c); err != nil {
			failed := make(chan error, 1)
			failed <- err
			ended = failed
		}
	}
}

// launch starts a component. The channel delivers the reason for its end.
func launch(ctx context.Context, c component) (<-chan error, error) {
	log, err := os.OpenFile(logPath(c.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close() //nolint:errcheck // the component has its own descriptor
	cmd := exec.CommandContext(ctx, c.name, c.args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", c.name, err)
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errors.New("exit status 0, but a component must not exit")
		}
		ended <- err
	}()
	return ended, nil
}

func logPath(name string) string { return filepath.Join(logDir, name+".log") }

// tail returns the last lines of a component's log, for error messages.
func tail(name string) []byte {
	data, err := os.ReadFile(logPath(name))
	if err != nil {
		return []byte(err.Error())
	}
	const lines = 30
	for n, i := 0, len(data); i > 0; n++ {
		if i = bytes.LastIndexByte(data[:i], '\n'); n == lines && i >= 0 {
			return data[i+1:]
		}
	}
	return data
}

// forward forwards connections from the machine's listener to an address on the node, until the listener fails.
func forward(listener net.Listener, address string) {
	for {
		outer, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer outer.Close() //nolint:errcheck // all data have been sent, or the connection has failed already
			inner, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer inner.Close() //nolint:errcheck // likewise
			carry(outer.(*net.TCPConn), inner.(*net.TCPConn))
		}()
	}
}

// carry copies in both directions and passes half-closes on.
func carry(a, b *net.TCPConn) {
	var both errgroup.Group
	for _, way := range [][2]*net.TCPConn{{a, b}, {b, a}} {
		both.Go(func() error {
			_, err := io.Copy(way[0], way[1])
			return errors.Join(err, way[0].CloseWrite())
		})
	}
	_ = both.Wait() // client and server notice a broken connection themselves
}
