package signer

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/sluice-cni/sluice/daemon/authority"
)

const (
	// object is the name of the Secret with the keys, and of the ConfigMap with the certificates of roots.
	object = "sluice-ca"
	// rotate is the annotation of the Secret by which an operator asks for a rotation.
	rotate = "sluice.dev/ca-rotate"
	// bundle is the key of the ConfigMap. In the Secret, cert-manager puts the root under this key.
	bundle = "ca.crt"

	nextKey, nextCertificate, nextSigns = "next.key", "next.crt", "next-signs"
	oldCertificates, oldUntil           = "old.crt", "old-until"
)

// errDamaged is the error for a Secret that does not have a CA.
var errDamaged = errors.New("it is damaged, and sluiced never replaces it, because running pods trust its root: " +
	"restore it; or delete it to have a new root, which running pods do not trust at first")

// roots returns the state of the roots. It is published, and the steps that are due have been taken.
func (s *Signer) roots(ctx context.Context) (authority.Rotation, error) {
	for {
		secret, err := s.secret(ctx)
		if err != nil {
			return authority.Rotation{}, err
		}
		r, err := decode(secret.Data)
		if err != nil {
			return r, fmt.Errorf("reading the CA in Secret %s/%s: %w: %w", s.conf.Namespace, object, err, errDamaged)
		}
		if err := s.publish(ctx, r); err != nil {
			return r, err
		}
		_, asked := secret.Annotations[rotate]
		next, changed, err := r.Advance(time.Now(), s.conf.Times, asked, s.newRoot)
		if err != nil || !changed && !asked {
			return r, err
		}
		if asked && !changed {
			s.log.Warn("no rotation begins: one is under way, or the CA was not made by sluiced", "roots", r.String())
		}
		if err := s.update(ctx, secret, next); err != nil && !apierrors.IsConflict(err) {
			return r, err
		}
	}
}

func (s *Signer) newRoot() (authority.Authority, error) {
	return authority.NewRoot(time.Now(), s.conf.Times.Root, s.conf.Zones)
}

// secret returns the Secret. It makes a root if there is no Secret.
func (s *Signer) secret(ctx context.Context) (*corev1.Secret, error) {
	secrets := s.client.CoreV1().Secrets(s.conf.Namespace)
	secret, err := secrets.Get(ctx, object, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return secret, wrap(err, "getting Secret %s/%s", s.conf.Namespace, object)
	}
	// Their keys are lost, and proxies may still have intermediates below them.
	published, err := Published(ctx, s.client, s.conf.Namespace)
	if err != nil {
		return nil, err
	}
	root, err := s.newRoot()
	if err != nil {
		return nil, err
	}
	r := authority.Start(root, published, time.Now(), s.conf.Times)
	data, err := encode(nil, r)
	if err != nil {
		return nil, err
	}
	secret, err = secrets.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: object}, Type: corev1.SecretTypeTLS, Data: data,
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) { // another signer was first, and its root counts
		secret, err = secrets.Get(ctx, object, metav1.GetOptions{})
	} else if err == nil {
		s.log.Info("root made", "roots", r.String())
	}
	return secret, wrap(err, "creating Secret %s/%s", s.conf.Namespace, object)
}

// Published returns the roots that the CA in a namespace has published. There are none while it is late.
func Published(ctx context.Context, client kubernetes.Interface, namespace string) ([]*x509.Certificate, error) {
	m, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, object, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("getting ConfigMap %s/%s: %w", namespace, object, err)
	}
	roots, err := authority.ParseCertificates([]byte(m.Data[bundle]))
	if err != nil {
		return nil, nil //nolint:nilerr // publish replaces a text that has no certificates
	}
	return roots, nil
}

// update writes the state into the Secret, and takes away the annotation that asks for a rotation.
func (s *Signer) update(ctx context.Context, secret *corev1.Secret, r authority.Rotation) error {
	data, err := encode(secret.Data, r)
	if err != nil {
		return err
	}
	secret = secret.DeepCopy()
	secret.Data = data
	delete(secret.Annotations, rotate)
	_, err = s.client.CoreV1().Secrets(s.conf.Namespace).Update(ctx, secret, metav1.UpdateOptions{})
	if err == nil {
		s.log.Info("roots changed", "roots", r.String())
	}
	return wrap(err, "updating Secret %s/%s", s.conf.Namespace, object)
}

// publish makes the ConfigMap have the certificates of all roots.
func (s *Signer) publish(ctx context.Context, r authority.Rotation) error {
	maps := s.client.CoreV1().ConfigMaps(s.conf.Namespace)
	m, err := maps.Get(ctx, object, metav1.GetOptions{})
	roots := string(authority.EncodeCertificates(r.Roots()))
	switch {
	case apierrors.IsNotFound(err):
		_, err = maps.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: object}, Data: map[string]string{bundle: roots},
		}, metav1.CreateOptions{})
	case err == nil && m.Data[bundle] != roots:
		m = m.DeepCopy()
		if m.Data == nil {
			m.Data = map[string]string{}
		}
		m.Data[bundle] = roots
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
	}
	return wrap(err, "publishing the roots in ConfigMap %s/%s", s.conf.Namespace, object)
}

// decode reads the state from the data of the Secret.
func decode(data map[string][]byte) (r authority.Rotation, err error) {
	r.Signing, err = decodeAuthority(data, corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	if err != nil {
		return r, err
	}
	if len(data[nextCertificate]) > 0 || len(data[nextKey]) > 0 {
		next, err := decodeAuthority(data, nextCertificate, nextKey)
		if err != nil {
			return r, err
		}
		r.Next = &next
	}
	if r.NextSigns, err = decodeTime(data, nextSigns); err != nil {
		return r, err
	}
	if r.OldUntil, err = decodeTime(data, oldUntil); err != nil {
		return r, err
	}
	if len(data[oldCertificates]) > 0 {
		if r.Old, err = authority.ParseCertificates(data[oldCertificates]); err != nil {
			return r, fmt.Errorf("%s: %w", oldCertificates, err)
		}
	}
	return r, nil
}

func decodeAuthority(data map[string][]byte, certificate, key string) (authority.Authority, error) {
	a, err := authority.Parse(data[certificate], data[key])
	if err != nil && len(data[bundle]) > 0 { // cert-manager keeps the root apart from the chain
		if whole, err := authority.Parse(slices.Concat(data[certificate], data[bundle]), data[key]); err == nil {
			return whole, nil
		}
	}
	return a, wrap(err, "%s and %s", certificate, key)
}

func decodeTime(data map[string][]byte, key string) (time.Time, error) {
	if len(data[key]) == 0 {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339, string(data[key]))
	return t, wrap(err, "%s", key)
}

// encode returns data with the state in it.
func encode(data map[string][]byte, r authority.Rotation) (map[string][]byte, error) {
	set := map[string][]byte{
		oldCertificates: authority.EncodeCertificates(r.Old),
		nextSigns:       encodeTime(r.NextSigns),
		oldUntil:        encodeTime(r.OldUntil),
		nextCertificate: nil,
		nextKey:         nil,
	}
	var err error
	set[corev1.TLSCertKey] = authority.EncodeCertificates(r.Signing.Chain)
	if set[corev1.TLSPrivateKeyKey], err = authority.EncodeKey(r.Signing.Key); err != nil {
		return nil, err
	}
	if r.Next != nil {
		set[nextCertificate] = authority.EncodeCertificates(r.Next.Chain)
		if set[nextKey], err = authority.EncodeKey(r.Next.Key); err != nil {
			return nil, err
		}
	}
	maps.DeleteFunc(set, func(_ string, value []byte) bool { return len(value) == 0 })
	all := maps.Clone(data)
	for _, key := range []string{nextKey, nextCertificate, nextSigns, oldCertificates, oldUntil} {
		delete(all, key)
	}
	if all == nil {
		return set, nil
	}
	maps.Copy(all, set)
	return all, nil
}

func encodeTime(t time.Time) []byte {
	if t.IsZero() {
		return nil
	}
	return []byte(t.UTC().Format(time.RFC3339))
}

// wrap adds the act and the object to an error, if it is one.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
