package intermediate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/sluice-cni/sluice/daemon/authority"
	"github.com/sluice-cni/sluice/daemon/signer"
)

const (
	namespace = "sluice-system"

	node = "node-1"
	user = "system:serviceaccount:mitmproxy:mitmproxy"
)

// scene is an API server, a folder, and the log of the Keepers that run.
type scene struct {
	*fake.Clientset
	t   *testing.T
	dir string

	mu   sync.Mutex
	log  bytes.Buffer
	made int
	down bool   // the API server answers nothing
	deny bool   // it has each request denied from the start
	node string // the node of the proxy's token
}

func newScene(t *testing.T) *scene {
	s := &scene{Clientset: fake.NewClientset(), t: t, dir: t.TempDir(), node: node}
	s.PrependReactor("*", "certificatesigningrequests", func(a k8stesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.down {
			return true, nil, apierrors.NewServiceUnavailable("down")
		}
		if create, ok := a.(k8stesting.CreateAction); ok && create.GetVerb() == "create" {
			s.made++
			r, _ := create.GetObject().(*certificatesv1.CertificateSigningRequest)
			r.Name = fmt.Sprint(r.GenerateName, s.made)
			r.Spec.Username = user
			if s.deny {
				r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
					{Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue},
				}
			}
			r.Spec.Extra = map[string]certificatesv1.ExtraValue{"authentication.kubernetes.io/node-name": {s.node}}
		}
		return false, nil, nil
	})
	return s
}

// Write appends to the log.
func (s *scene) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(b)
}

func (s *scene) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// requests is the number of requests that were made.
func (s *scene) requests() (n int) {
	s.set(func() { n = s.made })
	return n
}

// start runs a part of the scene, and returns the function that ends it.
func (s *scene) start(part func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := part(ctx); err != nil {
			s.t.Error(err)
		}
	}()
	return func() { cancel(); <-done }
}

func (s *scene) startKeeper() (stop func()) {
	conf := Config{Namespace: namespace, Node: node, Dir: s.dir}
	return s.start(New(s, conf, slog.New(slog.NewTextHandler(s, nil))).Run)
}

// startSigner starts the CA, and waits until it watches requests: the fake API server does not show those to it that
// are made between its list and its watch.
func (s *scene) startSigner() (stop func()) {
	defer synctest.Wait()
	return s.start(signer.New(s, signer.Config{
		Namespace: namespace, Requester: user,
		Times: authority.Times{Root: 9 * time.Hour, Intermediate: time.Hour, Overlap: 10 * time.Minute},
	}, slog.New(slog.DiscardHandler)).Run)
}

// pass lets time pass on the bubble's clock.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// have returns the intermediate in the folder.
func (s *scene) have() authority.Authority {
	s.t.Helper()
	a, err := authority.ReadMitmproxy(s.dir)
	if err != nil {
		s.t.Fatalf("%v\n%s", err, s.log.String())
	}
	return a
}

func (s *scene) wantLog(text string) {
	s.t.Helper()
	s.set(func() {
		if !strings.Contains(s.log.String(), text) {
			s.t.Errorf("the log has no %q:\n%s", text, s.log.String())
		}
	})
}

// TestEverythingLate: the API server comes late, and then the CA. There is one request, and its answer is used.
func TestEverythingLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.down = true
		defer s.startKeeper()()
		pass(time.Hour)
		s.wantLog("requesting the intermediate of node node-1: down")
		s.set(func() { s.down = false })
		pass(time.Minute)
		s.wantLog("does sluice-ca run?")
		s.set(func() { s.down = true }) // once more, while the request waits
		pass(time.Minute)
		s.set(func() { s.down = false })
		defer s.startSigner()()
		pass(time.Minute)
		if got := s.have(); got.Chain[0].Subject.CommonName != "sluice proxy of "+node {
			t.Errorf("the intermediate is that of %q", got.Chain[0].Subject.CommonName)
		}
		if got := s.requests(); got != 1 {
			t.Errorf("there were %d requests, want one", got)
		}
	})
}

// TestRestarts: a container that starts again in the same pod uses the intermediate that it finds.
func TestRestarts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		defer s.startSigner()()
		for range 3 {
			stop := s.startKeeper()
			pass(time.Minute)
			s.have()
			stop()
		}
		if got := s.requests(); got != 1 {
			t.Errorf("there were %d requests, want one", got)
		}
	})
}

// TestRenewal: an intermediate is renewed after a third of its life, and stays while the CA is late.
func TestRenewal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		stopSigner := s.startSigner()
		defer s.startKeeper()()
		pass(time.Minute)
		first := s.have()
		stopSigner()
		pass(50 * time.Minute)
		if got := s.have(); !got.Chain[0].Equal(first.Chain[0]) {
			t.Error("there is another intermediate without the CA")
		}
		if got := s.requests(); got != 2 {
			t.Errorf("there were %d requests, want a second one after a third of an hour", got)
		}
		defer s.startSigner()()
		pass(time.Minute)
		second := s.have()
		if second.Chain[0].Equal(first.Chain[0]) || second.Key.Public() == first.Key.Public() {
			t.Error("the intermediate, or its key, is not a new one")
		}
		if !second.Root().Equal(first.Root()) {
			t.Error("the root has changed")
		}
		pass(5 * time.Hour) // through a rotation of the root, after three hours
		if last := s.have(); last.Root().Equal(first.Root()) || !time.Now().Before(last.RenewAt()) {
			t.Errorf("after five hours more the intermediate is %v", last.Chain[0].Subject)
		}
	})
}

// TestAnotherRoot: an intermediate below a root that is not published any more is replaced at once. While no root is
// published, or the API server does not tell, it stays.
func TestAnotherRoot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		forbidden := false
		s.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return forbidden, nil, apierrors.NewForbidden(corev1.Resource("configmaps"), "sluice-ca", nil)
		})
		stopSigner := s.startSigner()
		defer s.startKeeper()()
		pass(time.Second)
		first := s.have()
		stopSigner()
		s.set(func() { forbidden = true })
		pass(2 * lookInterval)
		s.wantLog("the published roots cannot be read")
		s.set(func() { forbidden = false })
		s.deleteCA()
		pass(2 * lookInterval)
		if got := s.requests(); got != 1 {
			t.Errorf("there were %d requests without published roots, want one at the start", got)
		}
		defer s.startSigner()()
		pass(lookInterval + pollInterval)
		root := s.have().Root()
		published, err := signer.Published(t.Context(), s, namespace)
		if err != nil || len(published) != 1 || !root.Equal(published[0]) || root.Equal(first.Root()) {
			t.Errorf("the intermediate is below %s; published are %d roots, %v", root.Subject, len(published), err)
		}
		pass(5 * lookInterval)
		if got := s.requests(); got != 2 {
			t.Errorf("there were %d requests, want two", got)
		}
	})
}

// deleteCA deletes the objects of the CA.
func (s *scene) deleteCA() {
	s.t.Helper()
	ctx, core := s.t.Context(), s.CoreV1()
	if err := errors.Join(
		core.Secrets(namespace).Delete(ctx, "sluice-ca", metav1.DeleteOptions{}),
		core.ConfigMaps(namespace).Delete(ctx, "sluice-ca", metav1.DeleteOptions{}),
	); err != nil {
		s.t.Fatal(err)
	}
}

// TestNeverPublished: if the roots of answers are never among the published ones, requests become rare.
func TestNeverPublished(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		root, err := authority.NewRoot(time.Now(), 100*time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		other, err := authority.NewRoot(time.Now(), 100*time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: "sluice-ca"},
			Data:       map[string]string{"ca.crt": string(authority.EncodeCertificates(other.Chain))},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		answer := func() (authority.Authority, time.Time) { return root, time.Now() }
		defer s.start(func(ctx context.Context) error { return s.answerAll(ctx, true, answer) })()
		defer s.startKeeper()()
		pass(time.Minute)
		s.have()
		s.wantLog("the root of the answer to request sluice-proxy-1 is not published in " + namespace)
		pass(time.Hour)
		if n := s.requests(); n < 2 || n > 12 { // in the first 16 minutes 7, then one each ten minutes
			t.Errorf("there were %d requests in an hour, want 12 at most", n)
		}
	})
}

// TestDenied: a denial is logged with its reason, and tried again at intervals.
func TestDenied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.node = "node-2"
		defer s.startSigner()()
		defer s.startKeeper()()
		pass(time.Minute)
		s.wantLog(`it is Denied`)
		s.wantLog("node-2")
		if n := s.requests(); n < 2 || n > 5 {
			t.Errorf("there were %d requests in a minute", n)
		}
		s.set(func() { s.node = node })
		pass(time.Minute)
		s.have()
	})
}

// TestBackOff: requests that are denied become rare. After an intermediate, they begin anew.
func TestBackOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		s.deny = true
		defer s.startKeeper()()
		const hour = 11 // requests: in the first 16 minutes 7, then one each ten minutes
		for i, want := range []int{hour, 6, 6} {
			before := s.requests()
			pass(time.Hour)
			if n := s.requests() - before; n < want-1 || n > want {
				t.Errorf("there were %d requests in hour %d, want about %d", n, i, want)
			}
		}
		s.set(func() { s.deny = false })
		stopSigner := s.startSigner()
		pass(maxRetry + time.Minute)
		s.have()
		stopSigner()
		s.set(func() { s.deny = true })
		before := s.requests()
		pass(90 * time.Minute) // the first renewal is due after 20 minutes
		if n := s.requests() - before; n < hour {
			t.Errorf("there were %d requests in the hour after the first renewal, want %d or more", n, hour)
		}
	})
}

// TestRequestGone: Kubernetes removes requests that nothing answers for a day.
func TestRequestGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		defer s.startKeeper()()
		pass(time.Minute)
		requests := s.CertificatesV1().CertificateSigningRequests()
		if err := requests.Delete(t.Context(), "sluice-proxy-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		defer s.startSigner()()
		pass(time.Minute)
		s.have()
	})
}

// TestFolder: a file that is no intermediate, or one that is over, is replaced.
func TestFolder(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"rubbish", "an intermediate that is over"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t)
				defer s.startSigner()()
				if name == "rubbish" {
					if err := os.WriteFile(filepath.Join(s.dir, "mitmproxy-ca.pem"), []byte("x"), 0o600); err != nil {
						t.Fatal(err)
					}
				} else {
					stop := s.startKeeper()
					pass(time.Minute)
					stop()
					pass(2 * time.Hour)
				}
				before := s.requests()
				defer s.startKeeper()()
				pass(time.Minute)
				if got := s.have(); !time.Now().Before(got.RenewAt()) || s.requests() != before+1 {
					t.Errorf("after %d more requests it is due at %s", s.requests()-before, got.RenewAt())
				}
			})
		})
	}
}

// TestWrongAnswers: an answer that is not for this key, or is over already, is not written, and requests do not follow
// each other without a pause.
func TestWrongAnswers(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func() (authority.Authority, time.Time){
		"the key of another": func() (authority.Authority, time.Time) {
			root, _ := authority.NewRoot(time.Now(), time.Hour, nil)
			return root, time.Now()
		},
		"over": func() (authority.Authority, time.Time) {
			root, _ := authority.NewRoot(time.Now().Add(-20*time.Hour), 100*time.Hour, nil)
			return root, time.Now().Add(-10 * time.Hour)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t)
				defer s.start(func(ctx context.Context) error { return s.answerAll(ctx, name == "over", answer) })()
				defer s.startKeeper()()
				pass(time.Minute)
				s.wantLog("the answer to request sluice-proxy-1")
				entries, err := os.ReadDir(s.dir)
				if err != nil || len(entries) > 0 {
					t.Errorf("the folder has %v, %v", entries, err)
				}
				if n := s.requests(); n < 2 || n > 5 {
					t.Errorf("there were %d requests in a minute", n)
				}
			})
		})
	}
}

// answerAll answers every request with an intermediate for its own key, or for another one.
func (s *scene) answerAll(ctx context.Context, own bool, by func() (authority.Authority, time.Time)) error {
	requests := s.CertificatesV1().CertificateSigningRequests()
	for ctx.Err() == nil {
		all, err := requests.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, r := range all.Items {
			if len(r.Status.Certificate) > 0 {
				continue
			}
			public, err := authority.CheckRequest(r.Spec.Request, node)
			if err != nil {
				return err
			}
			if !own {
				key, err := authority.NewKey()
				if err != nil {
					return err
				}
				public = key.Public()
			}
			root, at := by()
			chain, err := root.Issue(node, public, at, time.Hour)
			if err != nil {
				return err
			}
			r.Status.Certificate = authority.EncodeCertificates(chain)
			r.Status.Conditions = append(slices.Clone(r.Status.Conditions),
				certificatesv1.CertificateSigningRequestCondition{
					Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue,
				})
			if _, err := requests.UpdateStatus(ctx, &r, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		time.Sleep(time.Second)
	}
	return nil
}
