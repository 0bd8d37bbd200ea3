package authority

import (
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Rotation is the state of the roots. A root goes through it in this way:
//
//	Next, not announced -> Next, announced -> Signing -> Old -> gone
//
// All of them are published, so pods trust the next root before it signs, and an old one for as long as an intermediate
// below it may be in use.
type Rotation struct {
	// Signing signs intermediates.
	Signing Authority
	// Next is nil unless a rotation is under way. It signs from NextSigns on, which is zero until Next is published.
	Next      *Authority
	NextSigns time.Time
	// Old are roots that do not sign any more. Their keys are gone. All of them are trusted until OldUntil.
	Old      []*x509.Certificate
	OldUntil time.Time
}

// Times are the times of roots and intermediates.
type Times struct {
	// Root is the lifetime of a root. The next one is made when a third of it has passed.
	Root time.Duration
	// Intermediate is the lifetime of an intermediate. The next one is requested when a third of it has passed.
	Intermediate time.Duration
	// Overlap is the time for which the next root is published before it signs: pods need it to trust the root.
	Overlap time.Duration
}

// Check returns an error unless intermediates and overlaps fit into the life of a root.
func (t Times) Check() error {
	switch {
	case t.Root <= 0 || t.Intermediate <= 0 || t.Overlap < 0:
		return fmt.Errorf("the lifetimes %s of a root and %s of an intermediate must be positive, "+
			"and the overlap %s must not be negative", t.Root, t.Intermediate, t.Overlap)
	case t.Intermediate+t.Overlap > t.Root/3:
		return fmt.Errorf("the lifetime %s of an intermediate and the overlap %s must fit into a third "+
			"of the lifetime %s of a root", t.Intermediate, t.Overlap, t.Root)
	}
	return nil
}

// Start returns the state with a new root. The certificates in published were published before, and their keys are
// lost. Proxies may have intermediates below them.
func Start(signing Authority, published []*x509.Certificate, now time.Time, t Times) Rotation {
	r := Rotation{Signing: signing}
	r.retire(published, now, t)
	return r
}

// retire adds roots to the old ones.
func (r *Rotation) retire(roots []*x509.Certificate, now time.Time, t Times) {
	if len(roots) == 0 {
		return
	}
	r.Old = append(slices.Clone(r.Old), roots...)
	// A second signer may have issued an intermediate a moment ago, by a clock that is ahead.
	if until := now.Add(t.Intermediate + skew); until.After(r.OldUntil) {
		r.OldUntil = until
	}
}

// Roots returns the certificates to publish, each once.
func (r Rotation) Roots() []*x509.Certificate {
	roots := []*x509.Certificate{r.Signing.Root()}
	if r.Next != nil {
		roots = append(roots, r.Next.Root())
	}
	for _, old := range r.Old {
		if !slices.ContainsFunc(roots, old.Equal) {
			roots = append(roots, old)
		}
	}
	return roots
}

// due tells whether a rotation should begin: the signing root has passed a third of its life, or an operator asks for
// it. An authority that was not made here is never replaced by one that was.
func (r Rotation) due(now time.Time, asked bool) bool {
	return r.Next == nil && r.Signing.isOwn() && (asked || !now.Before(r.Signing.RenewAt()))
}

// Advance returns the state that follows r at that time, and whether it differs. The caller has published the roots of
// r before. makeRoot is called if a rotation begins.
func (r Rotation) Advance(now time.Time, t Times, asked bool, makeRoot func() (Authority, error)) (
	Rotation, bool, error,
) {
	switch {
	case r.due(now, asked):
		next, err := makeRoot()
		if err != nil {
			return r, false, err
		}
		r.Next, r.NextSigns = &next, time.Time{}
	case r.Next != nil && r.NextSigns.IsZero():
		r.NextSigns = now.Add(t.Overlap)
	case r.Next != nil && !now.Before(r.NextSigns):
		old := r.Signing.Root()
		r.Signing, r.Next, r.NextSigns = *r.Next, nil, time.Time{}
		r.retire([]*x509.Certificate{old}, now, t)
	case len(r.Old) > 0 && !now.Before(r.OldUntil):
		r.Old, r.OldUntil = nil, time.Time{}
	default:
		return r, false, nil
	}
	return r, true, nil
}

// String describes the state in one line, for logs.
func (r Rotation) String() string {
	parts := []string{fmt.Sprintf("%q signs", r.Signing.Chain[0].Subject.CommonName)}
	if r.Next != nil {
		from := "a time after its publication"
		if !r.NextSigns.IsZero() {
			from = r.NextSigns.UTC().Format(time.RFC3339)
		}
		parts = append(parts, fmt.Sprintf("%q will, from %s on", r.Next.Chain[0].Subject.CommonName, from))
	}
	for _, old := range r.Old {
		until := r.OldUntil.UTC().Format(time.RFC3339)
		parts = append(parts, fmt.Sprintf("%q is trusted until %s", old.Subject.CommonName, until))
	}
	return strings.Join(parts, "; ")
}
