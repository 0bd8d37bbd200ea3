package signer

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/sluice-cni/sluice/daemon/authority"
)

const (
	namespace = "sluice-system"
	proxy     = "system:serviceaccount:mitmproxy:mitmproxy"
)

var conf = Config{
	Namespace: namespace, Requester: proxy,
	Times: authority.Times{Root: 5 * 24 * time.Hour, Intermediate: 70 * time.Minute, Overlap: 10 * time.Minute},
}

// cluster is an API server with signers.
type cluster struct {
	*fake.Clientset
	t  *testing.T
	mu sync.Mutex
}

func newCluster(t *testing.T, objects ...runtime.Object) *cluster {
	return &cluster{Clientset: fake.NewClientset(objects...), t: t}
}

func (c *cluster) signer() *Signer { return New(c, conf, slog.New(slog.DiscardHandler)) }

// run runs count signers in a bubble until the test has done its work.
func (c *cluster) run(count int, test func()) {
	c.t.Helper()
	ctx, stop := context.WithCancel(c.t.Context())
	var group sync.WaitGroup
	for range count {
		group.Go(func() {
			if err := c.signer().Run(ctx); err != nil {
				c.t.Errorf("a signer ends: %v", err)
			}
		})
	}
	synctest.Wait()
	test()
	stop()
	group.Wait()
}

func (c *cluster) secret() *corev1.Secret {
	c.t.Helper()
	s, err := c.CoreV1().Secrets(namespace).Get(c.t.Context(), object, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// published returns the roots in the ConfigMap.
func (c *cluster) published() []*x509.Certificate {
	c.t.Helper()
	m, err := c.CoreV1().ConfigMaps(namespace).Get(c.t.Context(), object, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	roots, err := authority.ParseCertificates([]byte(m.Data["ca.crt"]))
	if err != nil {
		c.t.Fatal(err)
	}
	return roots
}

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := authority.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// newRequest returns a request as the API server stores that of a proxy on a node.
func newRequest(t *testing.T, name, node string, key crypto.Signer) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	text, err := authority.NewRequest(key, node)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: Name, Request: text, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageCertSign},
			Username: proxy, Extra: map[string]certificatesv1.ExtraValue{nodeName: {node}},
		},
	}
}

// ask creates a request, and returns it when the signers are idle.
func (c *cluster) ask(r *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	c.t.Helper()
	requests := c.CertificatesV1().CertificateSigningRequests()
	if _, err := requests.Create(c.t.Context(), r, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	synctest.Wait()
	r, err := requests.Get(c.t.Context(), r.Name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

// intermediate asks for the intermediate of a node, and verifies it.
func (c *cluster) intermediate(name, node string) authority.Authority {
	c.t.Helper()
	key := newKey(c.t)
	r := c.ask(newRequest(c.t, name, node, key))
	a, err := authority.Answer(r.Status.Certificate, key)
	if err != nil {
		c.t.Fatalf("request %s: %v; its conditions are %+v", name, err, r.Status.Conditions)
	}
	c.verify(a)
	return a
}

// verify checks that a client that trusts the published roots, and no others, accepts an intermediate.
func (c *cluster) verify(a authority.Authority) {
	c.t.Helper()
	roots := x509.NewCertPool()
	for _, root := range c.published() {
		roots.AddCert(root)
	}
	if _, err := a.Chain[0].Verify(x509.VerifyOptions{
		Roots: roots, CurrentTime: time.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}); err != nil {
		c.t.Errorf("at %s, with %d published roots: %v", time.Now(), len(c.published()), err)
	}
}

func TestFirstStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.run(1, func() {
			if roots := c.published(); len(roots) != 1 {
				t.Errorf("%d roots are published, want one", len(roots))
			}
			a := c.intermediate("r1", "node-1")
			if got, want := time.Until(a.Until()), conf.Times.Intermediate; got > want || got < want-time.Minute {
				t.Errorf("the intermediate is valid for %s, want %s", got, want)
			}
			r, err := c.CertificatesV1().CertificateSigningRequests().Get(t.Context(), "r1", metav1.GetOptions{})
			if err != nil || condition(r, certificatesv1.CertificateApproved) == nil {
				t.Errorf("the request is not approved: %+v, %v", r, err)
			}
		})
	})
}

// TestRestarts: neither restarts, nor a second signer, nor the loss of the ConfigMap changes the root.
func TestRestarts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		var first authority.Authority
		c.run(1, func() { first = c.intermediate("r1", "node-1") })
		before := c.secret().Data
		for i, count := range []int{1, 2, 3} {
			c.run(count, func() {
				err := c.CoreV1().ConfigMaps(namespace).Delete(t.Context(), object, metav1.DeleteOptions{})
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(interval) // of the bubble's clock: each signer looks again
				synctest.Wait()
				c.intermediate("again-"+string(rune('a'+i)), "node-2")
				c.verify(first)
			})
		}
		if !maps.EqualFunc(before, c.secret().Data, slices.Equal) {
			t.Error("the Secret has changed")
		}
	})
}

// TestRace: of signers that have all found no Secret, one makes the root, and all sign with it.
func TestRace(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	missing := false
	c.PrependReactor("get", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
		defer func() { missing = false }()
		return missing, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, object)
	})
	var roots []*x509.Certificate
	for range 3 {
		missing = true
		r, err := c.signer().roots(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		roots = append(roots, r.Signing.Root())
	}
	for _, root := range slices.Concat(roots, c.published()) {
		if !root.Equal(roots[0]) {
			t.Errorf("the signers have the roots %s and %s", roots[0].Subject, root.Subject)
		}
	}
}

// TestDamagedSecret: a Secret that cannot be read ends the signer, and stays as it is.
func TestDamagedSecret(t *testing.T) {
	t.Parallel()
	root := func() (certificate, key []byte) {
		a, err := authority.NewRoot(time.Now(), conf.Times.Root, nil)
		if err != nil {
			t.Fatal(err)
		}
		if key, err = authority.EncodeKey(a.Key); err != nil {
			t.Fatal(err)
		}
		return authority.EncodeCertificates(a.Chain), key
	}
	certificate, key := root()
	other, _ := root()
	for name, data := range map[string]map[string][]byte{
		"empty":                     {},
		"without its key":           {"tls.crt": certificate},
		"without its certificate":   {"tls.key": key},
		"with another root's key":   {"tls.crt": other, "tls.key": key},
		"with half a certificate":   {"tls.crt": certificate[:len(certificate)/2], "tls.key": key},
		"with half of a next root":  {"tls.crt": certificate, "tls.key": key, "next.crt": other},
		"with a time that is none":  {"tls.crt": certificate, "tls.key": key, "next-signs": []byte("soon")},
		"with old roots unreadable": {"tls.crt": certificate, "tls.key": key, "old.crt": []byte("x")},
		"with an end that is none":  {"tls.crt": certificate, "tls.key": key, "old-until": []byte("x")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, &corev1.Secret{
					ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: object}, Data: data,
				})
				err := c.signer().Run(t.Context())
				if !errors.Is(err, errDamaged) || !strings.Contains(err.Error(), namespace+"/"+object) {
					t.Errorf("got %v, want the error that names the Secret", err)
				}
				if !maps.EqualFunc(data, c.secret().Data, slices.Equal) {
					t.Error("the Secret has changed")
				}
			})
		})
	}
}

// TestAPIServerLate: a signer waits for the API server, and makes no root before it knows that there is none.
func TestAPIServerLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		late := true
		c.PrependReactor("get", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			return late, nil, apierrors.NewServiceUnavailable("late")
		})
		c.run(1, func() {
			time.Sleep(10 * interval) // of the bubble's clock
			for _, a := range c.Actions() {
				if a.GetVerb() == "create" {
					t.Errorf("the signer creates %s", a.GetResource().Resource)
				}
			}
			c.mu.Lock()
			late = false
			c.mu.Unlock()
			time.Sleep(interval)
			synctest.Wait()
			c.intermediate("r1", "node-1")
		})
	})
}

// TestRotation rotates the root by an operator's annotation. At each moment the published roots verify every
// intermediate that is valid, and the next root signs when the overlap has passed.
func TestRotation(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.conflicts()
		c.run(2, func() {
			first := c.published()[0]
			old := c.intermediate("before", "node-1")
			c.annotate()
			time.Sleep(interval)
			synctest.Wait()
			asked := time.Now()
			roots := c.published()
			if len(roots) != 2 || !roots[0].Equal(first) {
				t.Fatalf("%d roots are published after the annotation, want the first one and the next", len(roots))
			}
			if len(c.secret().Annotations) > 0 {
				t.Errorf("the annotation stays: %v", c.secret().Annotations)
			}
			time.Sleep(conf.Times.Overlap - time.Minute)
			if a := c.intermediate("during", "node-1"); !a.Root().Equal(first) {
				t.Error("the next root signs before the overlap has passed")
			}
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			latest := c.intermediate("after", "node-1")
			if !latest.Root().Equal(roots[1]) {
				t.Error("the next root does not sign after the overlap")
			}
			c.verify(old)
			if data := c.secret().Data; len(data["next.key"]) > 0 || len(data["old.crt"]) == 0 {
				t.Error("the Secret still has a next root, or has forgotten the old one")
			}
			time.Sleep(time.Until(asked.Add(conf.Times.Overlap + conf.Times.Intermediate)))
			if len(c.published()) != 2 {
				t.Error("the old root is gone before its last intermediate has ended")
			}
			time.Sleep(2 * time.Hour)
			synctest.Wait()
			if roots := c.published(); len(roots) != 1 || !roots[0].Equal(latest.Root()) {
				t.Errorf("%d roots are published at the end, want one", len(roots))
			}
		})
	})
}

// conflicts makes updates of the Secret fail that are not made from its present version, as a real API server does.
func (c *cluster) conflicts() {
	version := 0
	c.PrependReactor("update", "secrets", func(a k8stesting.Action) (bool, runtime.Object, error) {
		update, _ := a.(k8stesting.UpdateAction)
		s, _ := update.GetObject().(*corev1.Secret)
		c.mu.Lock()
		defer c.mu.Unlock()
		if want := string(rune('a' + version)); version > 0 && s.ResourceVersion != want {
			secrets := schema.GroupResource{Resource: "secrets"}
			return true, nil, apierrors.NewConflict(secrets, object, errors.New("old"))
		}
		version++
		s.ResourceVersion = string(rune('a' + version))
		return false, nil, nil
	})
}

func (c *cluster) annotate() {
	c.t.Helper()
	s := c.secret().DeepCopy()
	s.Annotations = map[string]string{rotate: "now"}
	if _, err := c.CoreV1().Secrets(namespace).Update(c.t.Context(), s, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// TestLostSecret: if the Secret is deleted, a new root signs, and the old one is published until its last intermediate
// has ended.
func TestLostSecret(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.run(1, func() {
			old := c.intermediate("before", "node-1")
			if err := c.CoreV1().Secrets(namespace).Delete(t.Context(), object, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(interval)
			synctest.Wait()
			latest := c.intermediate("after", "node-1")
			if latest.Root().Equal(old.Root()) {
				t.Error("a root without a key signs")
			}
			c.verify(old)
			time.Sleep(conf.Times.Intermediate + 2*time.Hour)
			synctest.Wait()
			if roots := c.published(); len(roots) != 1 {
				t.Errorf("%d roots are published at the end, want one", len(roots))
			}
		})
	})
}

// TestRootOfOnesOwn: an authority that an operator has put into the Secret signs, in the form of kubectl and in that of
// cert-manager.
func TestRootOfOnesOwn(t *testing.T) {
	t.Parallel()
	root, err := authority.NewRoot(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), conf.Times.Root, nil)
	if err != nil {
		t.Fatal(err)
	}
	key, err := authority.EncodeKey(root.Key)
	if err != nil {
		t.Fatal(err)
	}
	certificate := authority.EncodeCertificates(root.Chain)
	for name, data := range map[string]map[string][]byte{
		"kubectl":      {"tls.crt": certificate, "tls.key": key},
		"cert-manager": {"tls.crt": certificate, "tls.key": key, "ca.crt": certificate},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t, &corev1.Secret{
					ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: object}, Data: data,
				})
				c.run(1, func() {
					if a := c.intermediate("r", "node-1"); !a.Root().Equal(root.Root()) {
						t.Error("another root signs")
					}
				})
				if !maps.EqualFunc(data, c.secret().Data, slices.Equal) {
					t.Error("the Secret has changed")
				}
			})
		})
	}
}

// TestRefusals: a request that is not that of a proxy for its own node is denied, with the reason.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(*certificatesv1.CertificateSigningRequest)
		want   string
	}{
		{
			"another ServiceAccount",
			func(r *certificatesv1.CertificateSigningRequest) {
				r.Spec.Username = "system:serviceaccount:ci:default"
			},
			"system:serviceaccount:ci:default",
		},
		{
			"a user", func(r *certificatesv1.CertificateSigningRequest) { r.Spec.Username = "kubernetes-admin" },
			"kubernetes-admin",
		},
		{
			"another node", func(r *certificatesv1.CertificateSigningRequest) {
				r.Spec.Extra[nodeName] = certificatesv1.ExtraValue{"node-2"}
			}, "node-2",
		},
		{
			"a token without a node",
			func(r *certificatesv1.CertificateSigningRequest) { delete(r.Spec.Extra, nodeName) }, "names no node",
		},
		{
			"an empty node", func(r *certificatesv1.CertificateSigningRequest) {
				r.Spec.Extra[nodeName] = certificatesv1.ExtraValue{""}
			}, "names no node",
		},
		{
			"two nodes", func(r *certificatesv1.CertificateSigningRequest) {
				r.Spec.Extra[nodeName] = certificatesv1.ExtraValue{"node-1", "node-2"}
			}, "names no node",
		},
		{
			"another usage", func(r *certificatesv1.CertificateSigningRequest) {
				r.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageServerAuth}
			}, "usages",
		},
		{
			"rubbish", func(r *certificatesv1.CertificateSigningRequest) { r.Spec.Request = []byte("x") },
			"not a single one",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.run(1, func() {
					r := newRequest(t, "r", "node-1", newKey(t))
					tc.change(r)
					r = c.ask(r)
					denied := condition(r, certificatesv1.CertificateDenied)
					if denied == nil || !strings.Contains(denied.Message, tc.want) || len(r.Status.Certificate) > 0 {
						t.Errorf("got %+v, want it denied with %q", r.Status, tc.want)
					}
					approved := newRequest(t, "approved", "node-1", newKey(t))
					tc.change(approved)
					approved.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
						{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue},
					}
					approved = c.ask(approved)
					failed := condition(approved, certificatesv1.CertificateFailed)
					if failed == nil || condition(approved, certificatesv1.CertificateDenied) != nil ||
						len(approved.Status.Certificate) > 0 {
						t.Errorf("approved by an operator: got %+v, want it failed", approved.Status)
					}
				})
			})
		})
	}
}

// TestOtherSigners: requests to other signers are left alone.
func TestOtherSigners(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.run(1, func() {
			r := newRequest(t, "r", "node-1", newKey(t))
			r.Spec.SignerName = certificatesv1.KubeletServingSignerName
			if r = c.ask(r); len(r.Status.Conditions) > 0 || len(r.Status.Certificate) > 0 {
				t.Errorf("got %+v", r.Status)
			}
		})
	})
}
