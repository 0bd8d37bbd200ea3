package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
)

// Files and folders in the containers of captured pods.
const (
	trustMount = "/.sluice-ca"
	imageStore = "/etc/ssl/certs/ca-certificates.crt" // of the image tools:e2e
)

// trustedByPods checks that each container of a captured pod trusts the proxy, and that other pods get nothing.
func trustedByPods(ctx context.Context, t *testing.T, c *envconf.Config) {
	p := newPod("trusting", namespace, capture, "sleep 86400", "cp "+imageStore+" /init/store")
	readOnly := true
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{ReadOnlyRootFilesystem: &readOnly}
	share := corev1.VolumeMount{Name: "init", MountPath: "/init"}
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: share.Name})
	p.Spec.InitContainers[0].VolumeMounts = append(p.Spec.InitContainers[0].VolumeMounts, share)
	p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, share)
	must(t, client(c).Create(ctx, p))
	variable := newPod("variable", namespace, capture, "sleep 86400", "")
	variable.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "SSL_CERT_FILE", Value: "/missing.pem"}}
	must(t, client(c).Create(ctx, variable))
	must(t, client(c).Create(ctx, newPod("uncaptured", namespace, nil, "sleep 86400", "")))
	waitForTrust(ctx, t, c, "trusting", "trusted")
	for _, store := range []string{"/init/store", imageStore, "$SSL_CERT_FILE", "$NODE_EXTRA_CA_CERTS"} {
		wantTrusted(ctx, t, c, "trusting", "c", store)
	}
	debug(ctx, t, c, "trusting", "debugger")
	wantTrusted(ctx, t, c, "trusting", "debugger", imageStore)
	waitFor(ctx, t, "the pod without the label runs", func() (bool, error) {
		return running(ctx, c, "uncaptured"), nil
	})
	out, err := inPod(ctx, c, namespace, "uncaptured", "sh", "-c",
		"ls -d "+trustMount+" 2>/dev/null; env | grep -c CERT; grep -c sluice "+imageStore+"; true")
	if err != nil || strings.TrimSpace(out) != "0\n0" {
		t.Errorf("the pod without the label: got %q, %v; want no folder, no variable and no CA", out, err)
	}
	must(t, client(c).Delete(ctx, newPod("uncaptured", namespace, nil, "", "")))
	waitForTrust(ctx, t, c, "variable", "files-only")
	waitFor(ctx, t, "an event names the store that is missing", func() (bool, error) {
		return hasEventIn(ctx, c, namespace, "variable", "SluiceCANotTrusted", "/missing.pem")
	})
	must(t, client(c).Delete(ctx, variable))
}

// debug adds a container to a pod that runs, as kubectl debug does, and waits for it.
func debug(ctx context.Context, t *testing.T, c *envconf.Config, pod, name string) {
	t.Helper()
	k, err := kubernetes.NewForConfig(c.Client().RESTConfig())
	must(t, err)
	pods := k.CoreV1().Pods(namespace)
	p, err := pods.Get(ctx, pod, metav1.GetOptions{})
	must(t, err)
	like := p.Spec.Containers[0]
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, corev1.EphemeralContainer{
		EphemeralContainerCommon: corev1.EphemeralContainerCommon{
			Name: name, Image: like.Image, ImagePullPolicy: like.ImagePullPolicy, Command: like.Command, Args: like.Args,
		},
	})
	_, err = pods.UpdateEphemeralContainers(ctx, pod, p, metav1.UpdateOptions{})
	must(t, err)
	waitFor(ctx, t, name+" runs", func() (bool, error) {
		p, err := pods.Get(ctx, pod, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(p.Status.EphemeralContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.Name == name && s.State.Running != nil
		}), err
	})
}

// passedPods checks that TLS of a pod that is not to trust the CA is passed through, and seen.
func passedPods(ctx context.Context, t *testing.T, c *envconf.Config) {
	p := newPod("untouched", namespace, capture, "sleep 86400", "")
	p.Annotations = map[string]string{"sluice.dev/ca": "off"}
	must(t, client(c).Create(ctx, p))
	waitFor(ctx, t, "the pod is captured", func() (bool, error) {
		a, err := attachment(ctx, c, namespace+"/untouched")
		return a.State == "captured" && running(ctx, c, "untouched"), err
	})
	if out, err := inPod(ctx, c, namespace, "untouched", "ls", "-d", trustMount); err == nil {
		t.Errorf("the container has %s", strings.TrimSpace(out))
	}
	// The server does not speak TLS. mitmproxy would answer with a certificate of its own.
	conn, err := tunnel(ctx, c, "untouched", serverAddress(ctx, t, c), "80")
	must(t, err)
	handshakeCtx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = tls.Client(conn, &tls.Config{ServerName: "pass.example.com"}).HandshakeContext(handshakeCtx)
	if err == nil || !strings.Contains(err.Error(), "does not look like a TLS") {
		t.Errorf("got %v, want an answer by the server itself", err)
	}
	_ = conn.Close() // the proxy logs a connection that has ended
	proxy, err := only(ctx, c, proxies, "app=mitmproxy")
	must(t, err)
	defer func() {
		if t.Failed() {
			t.Logf("the proxy's log:\n%s", logs(ctx, t, c, proxies, proxy))
		}
	}()
	waitFor(ctx, t, "the proxy logs the connection", func() (bool, error) {
		return strings.Contains(logs(ctx, t, c, proxies, proxy),
			"TLS passed through: "+namespace+"/untouched to pass.example.com"), nil
	})
}

// waitForTrust waits until a pod has that state of trust.
func waitForTrust(ctx context.Context, t *testing.T, c *envconf.Config, pod, state string) {
	t.Helper()
	var got attached
	defer func() {
		if t.Failed() {
			t.Logf("the last status: %+v", got)
		}
	}()
	waitFor(ctx, t, pod+" is "+state, func() (bool, error) {
		var err error
		got, err = attachment(ctx, c, namespace+"/"+pod)
		return got.Trust == state && running(ctx, c, pod), err // its init container is trusted before
	})
}

// wantTrusted checks that a store in a container verifies the certificate that the proxy presents to the pod.
func wantTrusted(ctx context.Context, t *testing.T, c *envconf.Config, pod, container, store string) {
	t.Helper()
	var text, errs bytes.Buffer
	err := client(c).ExecInPod(ctx, namespace, pod, container, []string{"sh", "-c", "cat " + store}, &text, &errs)
	if err != nil {
		t.Fatalf("reading %s of %s: %v\n%s", store, pod, err, errs.String())
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text.Bytes()) {
		t.Fatalf("%s of %s has no certificate", store, pod)
	}
	if _, err := handshakeFrom(ctx, c, pod, serverAddress(ctx, t, c), roots); err != nil {
		t.Errorf("%s of %s does not verify the proxy: %v", store, pod, err)
	}
}
