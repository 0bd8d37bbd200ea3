package authority

import (
	"crypto/x509"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var times = Times{Root: 3 * year, Intermediate: week, Overlap: 24 * time.Hour}

// advance takes one step, and checks whether there was one.
func advance(t *testing.T, r Rotation, now time.Time, asked, want bool) Rotation {
	t.Helper()
	next, changed, err := r.Advance(now, times, asked, func() (Authority, error) {
		return NewRoot(now, times.Root, nil)
	})
	if err != nil || changed != want {
		t.Fatalf("at %s: changed %t, %v; want %t\n%s", now, changed, err, want, next)
	}
	return next
}

func wantRoots(t *testing.T, r Rotation, want ...*x509.Certificate) {
	t.Helper()
	got := r.Roots()
	if len(got) != len(want) || !slices.EqualFunc(got, want, func(a, b *x509.Certificate) bool { return a.Equal(b) }) {
		t.Errorf("published are %d roots, want %d: %s", len(got), len(want), r)
	}
}

// TestRotation is the life of two roots, step by step.
func TestRotation(t *testing.T) {
	t.Parallel()
	first := newRoot(t, epoch, times.Root)
	r := Start(first, nil, epoch, times)
	wantRoots(t, r, first.Root())
	due := epoch.Add(year)
	r = advance(t, r, due.Add(-time.Second), false, false)

	r = advance(t, r, due, false, true)
	second := r.Next
	if second == nil || !r.NextSigns.IsZero() {
		t.Fatalf("a third of its life has passed: %s", r)
	}
	wantRoots(t, r, first.Root(), second.Root())

	// The overlap begins when the root is published, which may be long after it was made.
	published := due.Add(time.Hour)
	r = advance(t, r, published, false, true)
	if want := published.Add(times.Overlap); !r.NextSigns.Equal(want) {
		t.Errorf("the next root signs from %s on, want %s", r.NextSigns, want)
	}
	r = advance(t, r, r.NextSigns.Add(-time.Second), true, false) // one that is asked for, during one, is none

	promoted := r.NextSigns
	r = advance(t, r, promoted, false, true)
	if r.Signing.Root() != second.Root() || r.Next != nil {
		t.Errorf("after the overlap: %s", r)
	}
	wantRoots(t, r, second.Root(), first.Root())
	end := issue(t, first, "n", promoted, times.Intermediate).Until()
	if !r.OldUntil.After(end) {
		t.Errorf("the old root is gone at %s, and its last intermediate at %s", r.OldUntil, end)
	}
	r = advance(t, r, r.OldUntil.Add(-time.Second), false, false)
	r = advance(t, r, r.OldUntil, false, true)
	wantRoots(t, r, second.Root())
	advance(t, r, promoted.Add(30*24*time.Hour), false, false)
}

func TestRotationByHand(t *testing.T) {
	t.Parallel()
	r := Start(newRoot(t, epoch, times.Root), nil, epoch, times)
	r = advance(t, r, epoch.Add(time.Hour), true, true)
	if r.Next == nil {
		t.Errorf("no rotation begins: %s", r)
	}
}

// TestForeignAuthorityStays: neither age nor an operator replaces an authority that was not made here. One that an
// operator has put beside it takes its place.
func TestForeignAuthorityStays(t *testing.T) {
	t.Parallel()
	foreign, root := corporate(t, 1)
	r := Start(foreign, nil, epoch, times)
	r = advance(t, r, epoch.Add(year-time.Hour), true, false)
	wantRoots(t, r, root.Root())
	next, nextRoot := corporate(t, -1)
	r.Next = &next
	now := epoch.Add(time.Hour)
	r = advance(t, r, now, false, true)
	wantRoots(t, r, root.Root(), nextRoot.Root())
	r = advance(t, r, now.Add(times.Overlap), false, true)
	if r.Signing.Key != next.Key {
		t.Errorf("it does not sign: %s", r)
	}
	wantRoots(t, r, nextRoot.Root(), root.Root())
}

// TestLostKey: roots that were published without their key are trusted until their intermediates have ended.
func TestLostKey(t *testing.T) {
	t.Parallel()
	lost, found := newRoot(t, epoch, times.Root), newRoot(t, epoch, times.Root)
	r := Start(found, lost.Chain, epoch, times)
	wantRoots(t, r, found.Root(), lost.Root())
	if end := issue(t, lost, "n", epoch, times.Intermediate).Until(); !r.OldUntil.After(end) {
		t.Errorf("it is gone at %s, and its last intermediate at %s", r.OldUntil, end)
	}
	wantRoots(t, advance(t, r, r.OldUntil, false, true), found.Root())
}

func TestRotationWithoutARoot(t *testing.T) {
	t.Parallel()
	r := Start(newRoot(t, epoch, times.Root), nil, epoch, times)
	broken := errors.New("no entropy")
	_, changed, err := r.Advance(epoch, times, true, func() (Authority, error) { return Authority{}, broken })
	if changed || !errors.Is(err, broken) {
		t.Errorf("changed %t, %v", changed, err)
	}
}

func TestTimes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		times Times
		want  bool
	}{
		{times, true},
		{Times{Root: time.Hour, Intermediate: 20 * time.Minute}, true},
		{Times{Root: time.Hour, Intermediate: 20 * time.Minute, Overlap: time.Second}, false},
		{Times{Root: year, Intermediate: year / 2}, false},
		{Times{Root: year, Intermediate: week, Overlap: -1}, false},
		{Times{Root: year}, false},
		{Times{}, false},
	} {
		if err := tc.times.Check(); (err == nil) != tc.want {
			t.Errorf("%+v: %v", tc.times, err)
		}
	}
}

// TestRandomRotations: whatever the times at which steps are taken and rotations asked for, pods trust every
// intermediate that is valid, and have trusted its root for the overlap before it was signed.
func TestRandomRotations(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	now := epoch
	first := newRoot(t, now, times.Root)
	r := Start(first, nil, now, times)
	// The first root signs at once: there is no other that pods trust.
	trusted := map[string]time.Time{string(first.Root().Raw): now.Add(-times.Overlap)}
	type intermediate struct {
		root  *x509.Certificate
		until time.Time
	}
	var valid []intermediate
	rotations := 0
	for range 20_000 {
		now = now.Add(time.Duration(random.Int64N(int64(48 * time.Hour))))
		asked := random.IntN(50) == 0
		next, _, err := r.Advance(now, times, asked, func() (Authority, error) {
			rotations++
			return NewRoot(now, times.Root, nil)
		})
		if err != nil {
			t.Fatal(err)
		}
		r = next
		published := map[string]bool{}
		for _, c := range r.Roots() {
			published[string(c.Raw)] = true
			if _, ok := trusted[string(c.Raw)]; !ok {
				trusted[string(c.Raw)] = now
			}
		}
		if err := r.Signing.usable(now); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if since := trusted[string(r.Signing.Root().Raw)]; now.Sub(since) < times.Overlap {
			t.Fatalf("seed %d: a root signs %s after it was published", seed, now.Sub(since))
		}
		valid = append(valid, intermediate{r.Signing.Root(), now.Add(times.Intermediate)})
		valid = slices.DeleteFunc(valid, func(i intermediate) bool { return now.After(i.until) })
		for _, i := range valid {
			if !published[string(i.root.Raw)] {
				t.Fatalf("seed %d: at %s an intermediate is valid until %s, and its root is not published: %s",
					seed, now, i.until, r)
			}
		}
	}
	if rotations < 100 {
		t.Errorf("seed %d: there were %d rotations, which shows little", seed, rotations)
	}
}
