package optin

import (
	"maps"
	"slices"
	"testing"

	"github.com/sluice-cni/sluice/daemon/config"
	"github.com/sluice-cni/sluice/integration/docs/page"
	"github.com/sluice-cni/sluice/plugin/attach"
)

// TestDocumentedLabels compares the table of labels with the label that Decide reads.
func TestDocumentedLabels(t *testing.T) {
	t.Parallel()
	rows := page.Read(t, page.Configuration).Table(t, "Labels", "label")
	page.Compare(t, "labels", rows, []string{Label})
}

// TestDocumentedAnnotations compares the table of annotations with those that Decide reads.
func TestDocumentedAnnotations(t *testing.T) {
	t.Parallel()
	var known []string
	for _, name := range slices.AppendSeq(slices.Clone(written), maps.Keys(annotations)) {
		known = append(known, attach.AnnotationPrefix+name)
	}
	slices.Sort(known)
	if got := slices.Sorted(maps.Keys(annotations)); !slices.Equal(got, config.Annotations()) {
		t.Errorf("the configuration knows the annotations %v, want %v", config.Annotations(), got)
	}
	page.Compare(t, "annotations", page.Read(t, page.Configuration).Table(t, "Annotations", "annotation"), known)
}
