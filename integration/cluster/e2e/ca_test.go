package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"sigs.k8s.io/e2e-framework/klient/k8s/resources"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

const (
	caObject   = "sluice-ca" // the Secret, the ConfigMap, the Deployment and the ServiceAccount
	caSigner   = "sluice.dev/proxy-ca"
	nodeOfPod  = "authentication.kubernetes.io/node-name"
	proxyUser  = "system:serviceaccount:" + proxies + ":mitmproxy"
	caInstance = "app.kubernetes.io/name=sluice-ca"
)

// TestCA is the story of the cluster's CA: the proxy comes before it, and then no event breaks the trust in it.
func TestCA(t *testing.T) {
	step(t, "the proxy waits for the CA, and presents a chain that the published root verifies", caIsLate)
	step(t, "every container of a captured pod trusts the proxy, and others get nothing", trustedByPods)
	step(t, "TLS of a pod that is not to trust the CA is passed through", passedPods)
	step(t, "restarts do not change the root", caRestarts)
	step(t, "the chart is uninstalled and installed, and proxies and running pods follow the new root", caReinstalled)
	step(t, "the root is rotated under load, without an error of trust", caRotation)
	step(t, "requests of others, and for other nodes, are denied", caRefusals)
	step(t, "the roles of the CA and of the proxy grant the verbs that they need, and no others", caRoles)
	step(t, "the CA and the proxy are removed", caRemoved)
}

func caDeployment() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: caObject, Namespace: system}}
}

// publishedCA returns the roots that are published; none if the CA has not published any.
func publishedCA(ctx context.Context, c *envconf.Config) ([]*x509.Certificate, error) {
	var m corev1.ConfigMap
	if err := client(c).Get(ctx, caObject, system, &m); err != nil {
		return nil, err
	}
	var roots []*x509.Certificate
	for text := []byte(m.Data["ca.crt"]); ; {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			return roots, nil
		}
		root, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		roots = append(roots, root)
	}
}

// waitForRoot waits until a root is published.
func waitForRoot(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	waitFor(ctx, t, "a root is published", func() (bool, error) {
		roots, err := publishedCA(ctx, c)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return len(roots) > 0, err
	})
}

// theRoot returns the only root that is published.
func theRoot(ctx context.Context, t *testing.T, c *envconf.Config) *x509.Certificate {
	t.Helper()
	roots, err := publishedCA(ctx, c)
	must(t, err)
	if len(roots) != 1 {
		t.Fatalf("%d roots are published, want one", len(roots))
	}
	return roots[0]
}

// tunnel connects from a pod to an address, with nc.
func tunnel(ctx context.Context, c *envconf.Config, pod, host, port string) (net.Conn, error) {
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	if err != nil {
		return nil, err
	}
	request := k.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Command: []string{"nc", host, port}, Stdin: true, Stdout: true,
		}, scheme.ParameterCodec)
	exec, err := remotecommand.NewWebSocketExecutor(c.Client().RESTConfig(), "GET", request.URL().String())
	if err != nil {
		return nil, err
	}
	stdin, ours := io.Pipe()
	theirs, stdout := io.Pipe()
	go func() {
		err := exec.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout})
		stdin.CloseWithError(err)
		stdout.CloseWithError(err)
	}()
	return &tunnelled{in: ours, out: theirs}, nil
}

// tunnelled is the end of a tunnel. It has only the methods of a net.Conn that a TLS client needs.
type tunnelled struct {
	net.Conn
	in  *io.PipeWriter
	out *io.PipeReader
}

func (c *tunnelled) Read(b []byte) (int, error)  { return c.out.Read(b) }
func (c *tunnelled) Write(b []byte) (int, error) { return c.in.Write(b) }

// Close ends the connection, and waits until nc has ended.
func (c *tunnelled) Close() error {
	_ = c.in.Close()
	_, err := io.Copy(io.Discard, c.out)
	return err
}

// handshake connects to the server from the captured pod, by TLS, as a client that trusts the published roots alone. It
// returns the certificates that the proxy presents. The server does not speak TLS, and mitmproxy answers nonetheless.
func handshake(ctx context.Context, c *envconf.Config, server string) ([]*x509.Certificate, error) {
	roots, err := publishedCA(ctx, c)
	if err != nil {
		return nil, err
	}
	trusted := x509.NewCertPool()
	for _, root := range roots {
		trusted.AddCert(root)
	}
	return handshakeFrom(ctx, c, "client", server, &tls.Config{RootCAs: trusted})
}

// handshakeFrom connects to the server from a captured pod, as handshake does, with a configuration without a name.
func handshakeFrom(
	ctx context.Context, c *envconf.Config, pod, server string, config *tls.Config,
) ([]*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	conn, err := tunnel(ctx, c, pod, server, "80")
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // the handshake is all that matters
	config.ServerName = "www.example.com"
	tlsConn := tls.Client(conn, config)
	if err := tlsConn.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return tlsConn.ConnectionState().PeerCertificates, nil
}

// wantChain checks that the proxy presents a certificate with the intermediate of this node, below that root.
func wantChain(ctx context.Context, t *testing.T, c *envconf.Config, root *x509.Certificate) {
	t.Helper()
	chain, err := handshake(ctx, c, serverAddress(ctx, t, c))
	must(t, err)
	n, err := getNode(ctx, c)
	must(t, err)
	if len(chain) < 2 || chain[1].Subject.CommonName != "sluice proxy of "+n.Name {
		t.Fatalf("the proxy presents %d certificates, %q; want the second to be the intermediate of %s",
			len(chain), subjects(chain), n.Name)
	}
	if err := chain[1].CheckSignatureFrom(root); err != nil {
		t.Errorf("the intermediate is not below the root %s: %v", root.Subject, err)
	}
}

func subjects(chain []*x509.Certificate) (all []string) {
	for _, c := range chain {
		all = append(all, c.Subject.CommonName)
	}
	return all
}

func serverAddress(ctx context.Context, t *testing.T, c *envconf.Config) string {
	t.Helper()
	var p corev1.Pod
	must(t, client(c).Get(ctx, "server", namespace, &p))
	return p.Status.PodIP
}

// scaleCA runs that many pods of the CA, and waits for them.
func scaleCA(ctx context.Context, t *testing.T, c *envconf.Config, replicas int) {
	t.Helper()
	must(t, client(c).Patch(ctx, caDeployment(), mergePatch(fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas))))
	waitForCA(ctx, t, c)
}

// waitForCA waits until the pods of the CA are those of its Deployment.
func waitForCA(ctx context.Context, t *testing.T, c *envconf.Config) {
	t.Helper()
	waitFor(ctx, t, "the Deployment of the CA is rolled out", func() (bool, error) {
		d := caDeployment()
		if err := client(c).Get(ctx, d.Name, d.Namespace, d); err != nil {
			return false, err
		}
		var pods corev1.PodList
		err := client(c).WithNamespace(system).List(ctx, &pods, resources.WithLabelSelector(caInstance))
		s, want := d.Status, int(*d.Spec.Replicas)
		return s.ObservedGeneration == d.Generation && int(s.UpdatedReplicas) == want &&
			int(s.AvailableReplicas) == want && len(pods.Items) == want, err
	})
}

// caIsLate runs the proxy without the CA, and then the CA.
func caIsLate(ctx context.Context, t *testing.T, c *envconf.Config) {
	waitForCA(ctx, t, c)
	waitForRoot(ctx, t, c)
	// kubelet brings the ConfigMap to the daemon about once a minute. A container that is created before stays unknown.
	waitFor(ctx, t, "the node has the CA", func() (bool, error) {
		_, err := inPod(ctx, c, namespace, "node", "test", "-s", "/run/sluice/trust/ca.pem")
		return err == nil, nil
	})
	root := theRoot(ctx, t, c)
	scaleCA(ctx, t, c, 0)
	must(t, applyFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, client(c).Create(ctx, inspected(newPod("client", namespace, capture, "sleep 86400", ""))))
	waitFor(ctx, t, "the proxy's sidecar has sent its request", func() (bool, error) {
		var requests certificatesv1.CertificateSigningRequestList
		err := client(c).List(ctx, &requests)
		return slices.ContainsFunc(requests.Items, func(r certificatesv1.CertificateSigningRequest) bool {
			return r.Spec.SignerName == caSigner && r.Spec.Username == proxyUser && len(r.Status.Conditions) == 0
		}), err
	})
	waitFor(ctx, t, "the client runs", func() (bool, error) { return running(ctx, c, "client"), nil })
	type outcome struct {
		chain []*x509.Certificate
		err   error
	}
	waiting := make(chan outcome, 1)
	server := serverAddress(ctx, t, c)
	go func() {
		chain, err := handshake(ctx, c, server)
		waiting <- outcome{chain, err}
	}()
	waitFor(ctx, t, "its connection waits", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/client")
		return a.Waiting == 1, err
	})
	if name, err := only(ctx, c, proxies, "app=mitmproxy"); err == nil {
		t.Errorf("the pod %s runs, and has no intermediate", name)
	}
	scaleCA(ctx, t, c, 1)
	waitForRollout(ctx, t, c, proxies, "mitmproxy")
	if got := <-waiting; got.err != nil || len(got.chain) < 2 {
		t.Errorf("the connection that waited: %q, %v", subjects(got.chain), got.err)
	}
	wantChain(ctx, t, c, root)
}

// inspected makes the proxy look into TLS of a pod, whatever sluiced knows of its trust.
func inspected(p *corev1.Pod) *corev1.Pod {
	p.Annotations = map[string]string{"sluice.dev/tls": "inspect"}
	return p
}

// deletePods deletes the pods that a selector selects, and waits until others run.
func deletePods(ctx context.Context, t *testing.T, c *envconf.Config, namespace, selector string) {
	t.Helper()
	var old, pods corev1.PodList
	selected := resources.WithLabelSelector(selector)
	must(t, client(c).WithNamespace(namespace).List(ctx, &old, selected))
	for _, p := range old.Items {
		must(t, client(c).Delete(ctx, &p, resources.WithGracePeriod(time.Second)))
	}
	waitFor(ctx, t, "other pods "+selector+" are ready", func() (bool, error) {
		err := client(c).WithNamespace(namespace).List(ctx, &pods, selected)
		return len(pods.Items) == len(old.Items) && !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool {
			isOld := slices.ContainsFunc(old.Items, func(o corev1.Pod) bool { return o.Name == p.Name })
			return isOld || !isPodReady(&p)
		}), err
	})
}

func isPodReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// caRestarts does to the CA and the proxy all that operators do, in some order.
func caRestarts(ctx context.Context, t *testing.T, c *envconf.Config) {
	root := theRoot(ctx, t, c)
	for _, event := range []struct {
		name string
		do   func()
	}{
		{"the proxy's pods are deleted", func() { deletePods(ctx, t, c, proxies, "app=mitmproxy") }},
		{"the CA's pod is deleted", func() { deletePods(ctx, t, c, system, caInstance) }},
		{"the ConfigMap is deleted", func() {
			must(t, client(c).Delete(ctx, &corev1.ConfigMap{ObjectMeta: caDeployment().ObjectMeta}))
			waitForRoot(ctx, t, c)
		}},
		{"three replicas run", func() { scaleCA(ctx, t, c, 3) }},
		{"the Deployment is deleted, and the chart installed", func() {
			must(t, client(c).Delete(ctx, caDeployment()))
			must(t, applyFile(ctx, c, "sluice.yaml"))
			waitForCA(ctx, t, c)
		}},
		{"both are rolled out again", func() {
			annotated := mergePatch(`{"spec":{"template":{"metadata":{"annotations":{"e2e":"again"}}}}}`)
			must(t, client(c).Patch(ctx, caDeployment(), annotated))
			must(t, client(c).Patch(ctx, daemonSet(proxies, "mitmproxy"), annotated))
			waitForCA(ctx, t, c)
			waitForRollout(ctx, t, c, proxies, "mitmproxy")
		}},
	} {
		event.do()
		if got := theRoot(ctx, t, c); !got.Equal(root) {
			t.Fatalf("after %q the root is %s, and was %s", event.name, got.Subject, root.Subject)
		}
		wantChain(ctx, t, c, root)
	}
}

// caReinstalled deletes all objects of the chart and the namespace, with the root in it, and installs the chart again.
func caReinstalled(ctx context.Context, t *testing.T, c *envconf.Config) {
	old := theRoot(ctx, t, c)
	must(t, deleteFile(ctx, c, "sluice.yaml"))
	must(t, deleteNamespace(ctx, c, system))
	must(t, applyFile(ctx, c, "sluice.yaml"))
	waitForRollout(ctx, t, c, system, "sluice")
	waitForRoot(ctx, t, c)
	root := theRoot(ctx, t, c)
	if root.Equal(old) {
		t.Fatalf("the root is %s, as before", root.Subject)
	}
	waitForFollowers(ctx, t, c, root)
}

// waitForFollowers waits until the proxy has an intermediate below a root, and the stores of a pod that has run all
// the time have the root, and checks that they verify the proxy.
func waitForFollowers(ctx context.Context, t *testing.T, c *envconf.Config, root *x509.Certificate) {
	t.Helper()
	server := serverAddress(ctx, t, c)
	waitFor(ctx, t, "the stores of the running pod have the root "+root.Subject.CommonName, func() (bool, error) {
		for _, container := range []string{"c", "debugger"} {
			for _, store := range runningStores {
				has, err := hasRoot(ctx, c, "trusting", container, store, root)
				if !has || err != nil {
					return false, err
				}
			}
		}
		return true, nil
	})
	waitFor(ctx, t, "the proxy has an intermediate below it", func() (bool, error) {
		chain, err := handshakeFrom(ctx, c, "client", server, &tls.Config{InsecureSkipVerify: true})
		return err == nil && len(chain) > 1 && chain[1].CheckSignatureFrom(root) == nil, nil
	})
	wantChain(ctx, t, c, root)
	for _, store := range runningStores {
		wantTrusted(ctx, t, c, "trusting", "c", store)
	}
	wantTrusted(ctx, t, c, "trusting", "debugger", imageStore)
}

// caRotation rotates the root by hand, with an overlap of seconds, while clients connect without a pause.
func caRotation(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, apply(ctx, c, render(ctx, t, "ca.overlap=20s")))
	waitForCA(ctx, t, c)
	old := theRoot(ctx, t, c)
	load := startHandshakes(ctx, c, serverAddress(ctx, t, c))
	defer load.stop()
	load.wantProgress(ctx, t, "before the rotation")
	secret := &corev1.Secret{ObjectMeta: caDeployment().ObjectMeta}
	must(t, client(c).Patch(ctx, secret, mergePatch(`{"metadata":{"annotations":{"sluice.dev/ca-rotate":"now"}}}`)))
	waitFor(ctx, t, "the next root is published beside the old one", func() (bool, error) {
		roots, err := publishedCA(ctx, c)
		return len(roots) == 2 && roots[0].Equal(old), err
	})
	load.wantProgress(ctx, t, "with two roots")
	waitFor(ctx, t, "the next root signs, and the old one is trusted still", func() (bool, error) {
		roots, err := publishedCA(ctx, c)
		return len(roots) == 2 && roots[1].Equal(old), err
	})
	load.wantProgress(ctx, t, "with an intermediate of the old root")
	deletePods(ctx, t, c, proxies, "app=mitmproxy")
	roots, err := publishedCA(ctx, c)
	must(t, err)
	wantChain(ctx, t, c, roots[0])
	load.wantProgress(ctx, t, "with an intermediate of the new root")
	load.stop()
	t.Logf("%d handshakes, by the issuer of the intermediate: %v", load.count(), load.byRoot)
	for _, err := range load.errs {
		var untrusted *tls.CertificateVerificationError
		if errors.As(err, &untrusted) {
			t.Errorf("a client does not trust the proxy: %v", err)
		}
		t.Logf("a handshake failed: %v", err)
	}
	// The end of the proxy's pod ends the handshakes that are under way in it.
	if len(load.errs) > loadClients {
		t.Errorf("%d handshakes failed, and %d at most can have been under way", len(load.errs), loadClients)
	}
	for _, root := range roots {
		if load.byRoot[root.Subject.CommonName] == 0 {
			t.Errorf("no handshake was below the root %s", root.Subject)
		}
	}
	waitForFollowers(ctx, t, c, roots[0])
}

const loadClients = 3

// handshakes are clients that connect without a pause.
type handshakes struct {
	stop   func()
	mu     sync.Mutex
	byRoot map[string]int
	errs   []error
}

func startHandshakes(ctx context.Context, c *envconf.Config, server string) *handshakes {
	h := &handshakes{byRoot: map[string]int{}}
	done := make(chan struct{})
	var clients sync.WaitGroup
	h.stop = sync.OnceFunc(func() { close(done); clients.Wait() })
	for range loadClients {
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				chain, err := handshake(ctx, c, server)
				h.mu.Lock()
				switch {
				case err != nil:
					h.errs = append(h.errs, err)
				case len(chain) < 2:
					h.errs = append(h.errs, fmt.Errorf("the proxy presents %q", subjects(chain)))
				default:
					h.byRoot[chain[1].Issuer.CommonName]++
				}
				h.mu.Unlock()
			}
		})
	}
	return h
}

func (h *handshakes) count() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, count := range h.byRoot {
		n += count
	}
	return n + len(h.errs)
}

// wantProgress waits until each client has connected some times more.
func (h *handshakes) wantProgress(ctx context.Context, t *testing.T, when string) {
	t.Helper()
	before := h.count()
	waitFor(ctx, t, "clients connect "+when, func() (bool, error) { return h.count() >= before+10, nil })
}

// newRequest returns a request for the intermediate of a node.
func newRequest(t *testing.T, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: node}}, key)
	must(t, err)
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: caSigner, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageCertSign},
		},
	}
}

// caRefusals sends requests with tokens of the proxy, as a thief would, and as others.
func caRefusals(ctx context.Context, t *testing.T, c *envconf.Config) {
	admin, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	must(t, err)
	name, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	var pod corev1.Pod
	must(t, client(c).Get(ctx, name, proxies, &pod))
	token := func(bound *authenticationv1.BoundObjectReference) kubernetes.Interface {
		token, err := admin.CoreV1().ServiceAccounts(proxies).CreateToken(ctx, "mitmproxy",
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}},
			metav1.CreateOptions{})
		must(t, err)
		config := rest.AnonymousClientConfig(c.Client().RESTConfig())
		config.BearerToken = token.Status.Token
		k, err := kubernetes.NewForConfig(config)
		must(t, err)
		return k
	}
	other := rest.CopyConfig(c.Client().RESTConfig())
	other.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":default", Groups: []string{"system:masters"},
		Extra: map[string][]string{nodeOfPod: {pod.Spec.NodeName}},
	}
	others, err := kubernetes.NewForConfig(other)
	must(t, err)
	bound := token(&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: name, UID: pod.UID})
	for _, tc := range []struct {
		name   string
		by     kubernetes.Interface
		node   string
		change func(*certificatesv1.CertificateSigningRequest)
		want   string // part of the reason; empty: it is signed
	}{
		{"the proxy, for its node", bound, pod.Spec.NodeName, nil, ""},
		{"the proxy, for another node", bound, "another", nil, `"CN=another"`},
		{"a token without a pod", token(nil), pod.Spec.NodeName, nil, "names no node"},
		{"another ServiceAccount", others, pod.Spec.NodeName, nil, namespace + ":default"},
		{"an administrator", admin, pod.Spec.NodeName, nil, "only"},
		{"another usage", bound, pod.Spec.NodeName, func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageServerAuth}
		}, "usages"},
	} {
		request := newRequest(t, tc.node)
		if tc.change != nil {
			tc.change(request)
		}
		request, err := tc.by.CertificatesV1().CertificateSigningRequests().Create(ctx, request, metav1.CreateOptions{})
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		waitFor(ctx, t, tc.name+" is answered", func() (bool, error) {
			err := client(c).Get(ctx, request.Name, "", request)
			return len(request.Status.Certificate) > 0 || denial(request) != "", err
		})
		if got := denial(request); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s: denied with %q, want %q", tc.name, got, tc.want)
		}
		must(t, client(c).Delete(ctx, request))
	}
}

// denial returns the reason for which a request was denied, or an empty one.
func denial(request *certificatesv1.CertificateSigningRequest) string {
	for _, c := range request.Status.Conditions {
		if c.Type == certificatesv1.CertificateDenied {
			return c.Message
		}
	}
	return ""
}

func caRoles(ctx context.Context, t *testing.T, c *envconf.Config) {
	const ca = "system:serviceaccount:" + system + ":" + caObject
	const daemon = "system:serviceaccount:" + system + ":sluice"
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	must(t, err)
	for _, can := range []struct {
		user, verb, group, resource, name string
		want                              bool
	}{
		{ca, "get", "", "secrets", caObject, true}, {ca, "update", "", "secrets", caObject, true},
		{ca, "create", "", "secrets", "", true},
		{ca, "get", "", "secrets", "other", false}, {ca, "list", "", "secrets", "", false},
		{ca, "delete", "", "secrets", caObject, false}, {ca, "patch", "", "secrets", caObject, false},
		{ca, "get", "", "configmaps", caObject, true}, {ca, "update", "", "configmaps", caObject, true},
		{ca, "get", "", "configmaps", "sluice", false}, {ca, "delete", "", "configmaps", caObject, false},
		{ca, "list", "certificates.k8s.io", "certificatesigningrequests", "", true},
		{ca, "create", "certificates.k8s.io", "certificatesigningrequests", "", false},
		{ca, "sign", "certificates.k8s.io", "signers", caSigner, true},
		{ca, "approve", "certificates.k8s.io", "signers", caSigner, true},
		{ca, "sign", "certificates.k8s.io", "signers", "kubernetes.io/kube-apiserver-client", false},
		{ca, "get", "", "pods", "", false},
		{proxyUser, "create", "certificates.k8s.io", "certificatesigningrequests", "", true},
		{proxyUser, "get", "certificates.k8s.io", "certificatesigningrequests", "", true},
		{proxyUser, "list", "certificates.k8s.io", "certificatesigningrequests", "", false},
		{proxyUser, "approve", "certificates.k8s.io", "signers", caSigner, false},
		{proxyUser, "get", "", "secrets", caObject, false},
		{proxyUser, "get", "", "configmaps", caObject, true}, {proxyUser, "get", "", "configmaps", "sluice", false},
		{proxyUser, "list", "", "configmaps", "", false}, {proxyUser, "update", "", "configmaps", caObject, false},
		{daemon, "get", "", "secrets", caObject, false},
	} {
		review := &authv1.SubjectAccessReview{Spec: authv1.SubjectAccessReviewSpec{
			User: can.user, Groups: []string{"system:serviceaccounts", "system:authenticated"},
			ResourceAttributes: &authv1.ResourceAttributes{
				Namespace: system, Verb: can.verb, Group: can.group, Resource: can.resource, Name: can.name,
			},
		}}
		got, err := k.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		must(t, err)
		if got.Status.Allowed != can.want {
			t.Errorf("%s: %s %s %s: allowed %t, want %t",
				can.user, can.verb, can.resource, can.name, got.Status.Allowed, can.want)
		}
	}
	// The policy limits the right to create.
	config := rest.CopyConfig(c.Client().RESTConfig())
	config.Impersonate = rest.ImpersonationConfig{UserName: ca}
	as, err := kubernetes.NewForConfig(config)
	must(t, err)
	for reason, secret := range map[string]*corev1.Secret{
		"and no other":       {ObjectMeta: metav1.ObjectMeta{Name: "other"}, Type: corev1.SecretTypeOpaque},
		"sluice-ca, and no ": {ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}, Type: corev1.SecretTypeOpaque},
		"and of no other": {
			ObjectMeta: metav1.ObjectMeta{
				Name: caObject, Annotations: map[string]string{corev1.ServiceAccountNameKey: "sluice"},
			},
			Type: corev1.SecretTypeServiceAccountToken,
		},
	} {
		_, err := as.CoreV1().Secrets(system).Create(ctx, secret, metav1.CreateOptions{DryRun: []string{"All"}})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), reason) {
			t.Errorf("creating a Secret: got %v, want it forbidden with %q", err, reason)
		}
	}
}

// caRemoved leaves the cluster as TestCA found it: with sluice, without a proxy.
func caRemoved(ctx context.Context, t *testing.T, c *envconf.Config) {
	must(t, applyFile(ctx, c, "sluice.yaml"))
	must(t, client(c).Delete(ctx, newPod("client", namespace, nil, "", "")))
	must(t, deleteFile(ctx, c, "mitmproxy/mitmproxy.yaml"))
	must(t, deleteNamespace(ctx, c, proxies))
	waitFor(ctx, t, "the client has gone", func() (bool, error) {
		var p corev1.Pod
		err := client(c).Get(ctx, "client", namespace, &p)
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return false, err
	})
}
