// Package signer is the CA of a Kubernetes cluster. It makes the root and keeps it in a Secret, publishes the
// certificates of roots in a ConfigMap, and signs the intermediates that the proxies of nodes request with
// CertificateSigningRequests.
//
// The Secret is created, and changed by a rotation, and replaced by nothing: running pods trust its root. Every update
// names the version that it is made from, so signers may run side by side.
package signer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-cni/sluice/daemon/authority"
)

// Name is the signerName of requests for the intermediate of a proxy.
const Name = "sluice.dev/proxy-ca"

// interval is the time between two looks at the Secret and the ConfigMap. Requests are answered as they come.
const interval = 5 * time.Second

// Config is the configuration of a Signer.
type Config struct {
	// Namespace has the Secret and the ConfigMap.
	Namespace string
	// Requester is the user name of the proxies' ServiceAccount.
	Requester string
	// Zones are the DNS zones in which new roots can sign; none: all names.
	Zones []string
	Times authority.Times
}

// Signer is the CA of a cluster.
type Signer struct {
	client kubernetes.Interface
	conf   Config
	log    *slog.Logger
}

// New makes a Signer.
func New(client kubernetes.Interface, conf Config, log *slog.Logger) *Signer {
	return &Signer{client, conf, log}
}

// Run serves until ctx ends. It returns an error if the Secret is damaged, and tries again after all others.
func (s *Signer) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	ours := informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.signerName", Name).String()
	})
	factory := informers.NewSharedInformerFactoryWithOptions(s.client, 0, ours) // 0: no resync
	requests := factory.Certificates().V1().CertificateSigningRequests()
	changed := make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default: // the next pass sees all changes
		}
	}
	if _, err := requests.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		UpdateFunc: func(any, any) { notify() },
	}); err != nil {
		stop()
		return fmt.Errorf("watching certificate signing requests: %w", err)
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	defer stop() // before Shutdown, which waits for the watch to end
	tick := time.NewTicker(interval)
	defer tick.Stop()
	logged := ""
	for {
		err := s.pass(ctx, requests.Lister())
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errDamaged):
			return err
		case err == nil:
			logged = ""
		case err.Error() != logged:
			logged = err.Error()
			s.log.Error("the CA cannot serve yet; trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

// pass brings the roots up to date, and then answers the requests that wait.
func (s *Signer) pass(ctx context.Context, requests listers.CertificateSigningRequestLister) error {
	r, err := s.roots(ctx)
	if err != nil {
		return err
	}
	all, err := requests.List(labels.Everything())
	if err != nil {
		return fmt.Errorf("listing certificate signing requests: %w", err)
	}
	var errs []error
	for _, request := range all {
		if request.Spec.SignerName == Name && !answered(request) {
			errs = append(errs, s.answer(ctx, request.DeepCopy(), r.Signing))
		}
	}
	return errors.Join(errs...)
}

// answered tells whether a request needs nothing more from a signer.
func answered(request *certificatesv1.CertificateSigningRequest) bool {
	return len(request.Status.Certificate) > 0 || condition(request, certificatesv1.CertificateDenied) != nil ||
		condition(request, certificatesv1.CertificateFailed) != nil
}
