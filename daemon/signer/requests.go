package signer

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-cni/sluice/daemon/authority"
)

// nodeName is the key under which the API server puts the node of a pod's token, from Kubernetes 1.30 on.
const nodeName = "authentication.kubernetes.io/node-name"

// condition returns the condition of a type that a request has, or nil.
func condition(
	request *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType,
) *certificatesv1.CertificateSigningRequestCondition {
	for i, c := range request.Status.Conditions {
		if c.Type == kind {
			return &request.Status.Conditions[i]
		}
	}
	return nil
}

// answer denies a request, or approves it and signs.
func (s *Signer) answer(
	ctx context.Context, request *certificatesv1.CertificateSigningRequest, signing authority.Authority,
) error {
	node, public, refusal := s.check(request)
	var err error
	if refusal != nil {
		err = s.deny(ctx, request, refusal)
	} else {
		err = s.sign(ctx, request, node, public, signing)
	}
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err): // another signer has answered, or the watch is behind
		return nil
	case err != nil:
		return fmt.Errorf("answering request %s: %w", request.Name, err)
	}
	return nil
}

// check returns the node and the key that a request is for, or the reason to refuse it. The API server itself writes
// the user and the node of its token into a request.
func (s *Signer) check(request *certificatesv1.CertificateSigningRequest) (string, crypto.PublicKey, error) {
	if user := request.Spec.Username; user != s.conf.Requester {
		return "", nil, fmt.Errorf("the request is from %q, and only %q may have an intermediate",
			user, s.conf.Requester)
	}
	nodes := request.Spec.Extra[nodeName]
	if len(nodes) != 1 || nodes[0] == "" {
		return "", nil, errors.New("the token of the request names no node: it is not one of a running pod, " +
			"or Kubernetes is older than 1.30")
	}
	if usages := request.Spec.Usages; !slices.Equal(usages, []certificatesv1.KeyUsage{certificatesv1.UsageCertSign}) {
		return "", nil, fmt.Errorf("the request is for the usages %q, want %q", usages, certificatesv1.UsageCertSign)
	}
	public, err := authority.CheckRequest(request.Spec.Request, nodes[0])
	return nodes[0], public, err
}

// deny refuses a request. One that is approved already, by an operator, cannot be denied any more and fails.
func (s *Signer) deny(ctx context.Context, request *certificatesv1.CertificateSigningRequest, refusal error) error {
	s.log.Warn("request denied", "request", request.Name, "user", request.Spec.Username, "err", refusal)
	requests := s.client.CertificatesV1().CertificateSigningRequests()
	verdict := certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue,
		Reason: "NotAllowed", Message: refusal.Error(), LastUpdateTime: metav1.Now(),
	}
	if condition(request, certificatesv1.CertificateApproved) != nil {
		verdict.Type = certificatesv1.CertificateFailed
		request.Status.Conditions = append(request.Status.Conditions, verdict)
		_, err := requests.UpdateStatus(ctx, request, metav1.UpdateOptions{})
		return err
	}
	request.Status.Conditions = append(request.Status.Conditions, verdict)
	_, err := requests.UpdateApproval(ctx, request.Name, request, metav1.UpdateOptions{})
	return err
}

// sign approves a request, unless that is done, and gives it its certificate.
func (s *Signer) sign(
	ctx context.Context, request *certificatesv1.CertificateSigningRequest, node string, public crypto.PublicKey,
	signing authority.Authority,
) error {
	chain, err := signing.Issue(node, public, time.Now(), s.conf.Times.Intermediate)
	if err != nil {
		return err
	}
	requests := s.client.CertificatesV1().CertificateSigningRequests()
	if condition(request, certificatesv1.CertificateApproved) == nil {
		request.Status.Conditions = append(request.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue,
			Reason: "NodeMatches", Message: "the token of the request is that of a proxy on node " + node,
			LastUpdateTime: metav1.Now(),
		})
		if request, err = requests.UpdateApproval(ctx, request.Name, request, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	request.Status.Certificate = authority.EncodeCertificates(chain)
	if _, err := requests.UpdateStatus(ctx, request, metav1.UpdateOptions{}); err != nil {
		return err
	}
	s.log.Info("intermediate signed", "request", request.Name, "node", node, "until", chain[0].NotAfter)
	return nil
}
