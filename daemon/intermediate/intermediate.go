// Package intermediate keeps the intermediate of a node's proxy in a folder: it requests it from the cluster's CA, and
// requests the next one long before it ends, and when its root is not published any more. The key is made in the folder
// and does not leave it.
package intermediate

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-cni/sluice/daemon/authority"
	"github.com/sluice-cni/sluice/daemon/pause"
	"github.com/sluice-cni/sluice/daemon/signer"
)

const (
	// pollInterval is the time between two looks at a request.
	pollInterval = time.Second
	// patience is the time without an answer after which the log says so.
	patience = 30 * time.Second
	// minRetry is the time after a failure. It doubles with each further request without an intermediate, up to
	// maxRetry: the API server keeps a denied request for an hour.
	minRetry = 15 * time.Second
	maxRetry = 10 * time.Minute
	// lookInterval is the longest time between two looks at the folder, and at the published roots.
	lookInterval = time.Minute
)

// Config is the configuration of a Keeper.
type Config struct {
	// Namespace has the ConfigMap with the published roots.
	Namespace string
	// Node is the node of the proxy.
	Node string
	// Dir is the folder, which is mitmproxy's confdir.
	Dir string
}

// Keeper keeps the intermediate of a node's proxy.
type Keeper struct {
	client kubernetes.Interface
	conf   Config
	log    *slog.Logger
	logged string        // the last error
	retry  time.Duration // after the last request that brought no good intermediate; 0: there is none
}

// New makes a Keeper.
func New(client kubernetes.Interface, conf Config, log *slog.Logger) *Keeper {
	return &Keeper{client: client, conf: conf, log: log}
}

// Run keeps the intermediate until ctx ends. It tries for ever, and always returns nil. The intermediate in the folder
// stays until there is a new one.
func (k *Keeper) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		wait := lookInterval
		if due := k.due(ctx); due > 0 {
			wait = min(wait, due)
		} else if err := k.renew(ctx); err != nil {
			k.report(ctx, err)
			wait = max(k.retry, minRetry)
		}
		_ = pause.For(ctx, wait) // the loop looks at ctx
	}
	return nil
}

// due is the time until the intermediate in the folder is to be renewed. It is not positive if there is none, or if
// pods do not trust its root, as when the CA was deleted and installed anew.
func (k *Keeper) due(ctx context.Context) time.Duration {
	a, err := authority.ReadMitmproxy(k.conf.Dir)
	if err != nil { // most likely there is none yet
		return 0
	}
	due, root := time.Until(a.RenewAt()), a.Root()
	if due > 0 && k.disowned(ctx, root) {
		k.log.Info("the root of the intermediate is not published", "node", k.conf.Node,
			"root", root.Subject.CommonName)
		return 0
	}
	return due
}

// disowned reports whether roots are published, and a given one is not among them. While the API server or the CA is
// late, no root is disowned: the intermediate in the folder is the best one until they come.
func (k *Keeper) disowned(ctx context.Context, root *x509.Certificate) bool {
	roots, err := signer.Published(ctx, k.client, k.conf.Namespace)
	if err != nil && k.isNew(ctx, err) {
		k.log.Error("the published roots cannot be read; trying again", "node", k.conf.Node, "err", err)
	}
	return len(roots) > 0 && !slices.ContainsFunc(roots, root.Equal)
}

// report logs an error once, until there is another one.
func (k *Keeper) report(ctx context.Context, err error) {
	if k.isNew(ctx, err) {
		k.log.Error("no new intermediate yet; trying again", "node", k.conf.Node, "err", err)
	}
}

// isNew reports whether an error is to be logged: it is not the last one that was.
func (k *Keeper) isNew(ctx context.Context, err error) bool {
	if ctx.Err() != nil || err.Error() == k.logged {
		return false
	}
	k.logged = err.Error()
	return true
}

// renew requests an intermediate and writes it into the folder.
func (k *Keeper) renew(ctx context.Context) error {
	key, err := authority.NewKey()
	if err != nil {
		return err
	}
	text, err := authority.NewRequest(key, k.conf.Node)
	if err != nil {
		return err
	}
	requests := k.client.CertificatesV1().CertificateSigningRequests()
	request, err := requests.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "sluice-proxy-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: signer.Name, Request: text, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageCertSign},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("requesting the intermediate of node %s: %w", k.conf.Node, err)
	}
	// Only now: a failure to create a request leaves no object, and a late API server is asked again soon.
	k.retry = min(max(2*k.retry, minRetry), maxRetry)
	k.log.Info("intermediate requested", "node", k.conf.Node, "request", request.Name)
	chain, err := k.await(ctx, request.Name)
	if err != nil {
		return fmt.Errorf("awaiting the answer to request %s: %w", request.Name, err)
	}
	a, err := authority.Answer(chain, key)
	if err != nil {
		return fmt.Errorf("reading the answer to request %s: %w", request.Name, err)
	}
	if !time.Now().Before(a.RenewAt()) { // the folder would have one that is due, and requests would not end
		return fmt.Errorf("the answer to request %s ends at %s: compare the clocks of this node and of the CA's, and "+
			"the end of the root", request.Name, a.Until().Format(time.RFC3339))
	}
	if err := a.WriteMitmproxy(k.conf.Dir); err != nil {
		return err
	}
	k.log.Info("intermediate received", "node", k.conf.Node, "request", request.Name, "until", a.Until())
	if k.disowned(ctx, a.Root()) { // requests become rare, because the next ones may bring no better intermediate
		return fmt.Errorf("the root of the answer to request %s is not published in %s", request.Name, k.conf.Namespace)
	}
	k.logged, k.retry = "", 0
	return nil
}

// await waits for the answer to a request, for as long as the request exists.
func (k *Keeper) await(ctx context.Context, name string) ([]byte, error) {
	late := time.Now().Add(patience)
	for {
		request, err := k.client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil, err
		case err != nil: // the API server is late, and has the request
			k.report(ctx, fmt.Errorf("getting request %s: %w", name, err))
		case len(request.Status.Certificate) > 0:
			return request.Status.Certificate, nil
		default:
			for _, c := range request.Status.Conditions {
				if c.Type != certificatesv1.CertificateApproved {
					return nil, fmt.Errorf("it is %s: %s", c.Type, c.Message)
				}
			}
			if time.Now().After(late) {
				k.report(ctx, errors.New("the CA has not answered yet: does sluice-ca run?"))
			}
		}
		if err := pause.For(ctx, pollInterval); err != nil {
			return nil, err
		}
	}
}
